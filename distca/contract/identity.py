"""Names of jobs, servers and tenants, and who a process is by its certificate: a role and a name.

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
MOST_NAME_CHARACTERS = 100
"""So that the id of an in-place server, which has its job's name, is no longer than 112."""

# No other path or option than itself: not `..`, `.git`, `-rf`. Of servers `<job>.rank-<n>` are the
# in-place ones, and no pool server or job may pass for one of them.
_NAME = (
    r"(?!.*\.rank-[0-9]+\Z)[A-Za-z0-9_]"
    rf"[A-Za-z0-9._-]{{0,{MOST_NAME_CHARACTERS - 1}}}"
)


def check_name(field: str, value: str) -> None:
    """
    Raises:
        ValueError: ``value``, which the field ``field`` has, can name no job, server or tenant.
    """
    if not re.fullmatch(_NAME, value):
        raise ValueError(
            f"{field} is {value!r}; give 1 to {MOST_NAME_CHARACTERS} of A-Z, a-z, 0-9, '.', '_', "
            "'-', not first '.' or '-', not last '.rank-N'"
        )


def in_place_server_id(job: str, rank: int) -> str:
    """The id of the server in the process of ``rank`` of the job that is called ``job``."""
    return f"{job}.rank-{rank}"


class Role(StrEnum):
    """The part of a process in a cluster; it decides which calls are allowed."""

    TRAINER = "trainer"
    SERVER = "server"
    OPERATOR = "operator"
    READ_ONLY = "read-only"
    CONTROL_PLANE = "control-plane"


_URI = re.compile(f"{TRUST_DOMAIN}({'|'.join(Role)})/({_NAME})")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A role and a name.

    Attributes:
        role: what the process does.
        name: which one it is; of trainers, the tenant.
    """

    role: Role
    name: str

    def __post_init__(self) -> None:
        check_name("name", self.name)

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
