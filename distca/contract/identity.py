"""Who a process is, by its certificate: a role and a name.

The certificate carries one URI ``spiffe://distca/<role>/<name>`` among its subject alternative
names, which is what cert-manager and SPIFFE issue. The role decides what a process may call; the
name of a trainer is its tenant: a job belongs to the name that opened it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

TRUST_DOMAIN = "spiffe://distca/"
NAME_PATTERN = r"[A-Za-z0-9._-]{1,128}"


class Role(StrEnum):
    """What a process does, which decides what it may call."""

    TRAINER = "trainer"
    SERVER = "server"
    OPERATOR = "operator"
    READ_ONLY = "read-only"
    CONTROL_PLANE = "control-plane"


_URI = re.compile(f"{TRUST_DOMAIN}({'|'.join(Role)})/({NAME_PATTERN})")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A role and a name.

    Attributes:
        role: what the process does.
        name: which one it is; of trainers, the tenant.

    Raises:
        ValueError: the name is empty, too long or has other characters.
    """

    role: Role
    name: str

    def __post_init__(self) -> None:
        if not re.fullmatch(NAME_PATTERN, self.name):
            raise ValueError(f"name is {self.name!r}; it must be {NAME_PATTERN}")

    @property
    def uri(self) -> str:
        """As it stands in the certificate."""
        return f"{TRUST_DOMAIN}{self.role}/{self.name}"


def identity_of(uris: Iterable[str]) -> Identity | None:
    """The identity that a certificate's URIs give; None if none or several of them are ours, or
    one is malformed: what is ambiguous gives no rights."""
    ours = [uri for uri in uris if uri.startswith(TRUST_DOMAIN)]
    found = _URI.fullmatch(ours[0]) if len(ours) == 1 else None
    return Identity(role=Role(found[1]), name=found[2]) if found else None
