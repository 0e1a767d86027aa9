"""``docs/security.md`` says what the code does."""

from __future__ import annotations

import re

from control_plane.access.access import short_name
from control_plane.access.access_policy import POLICIES
from control_plane.settings import AccessSettings
from distca.contract.codec import MAX_RANK_MANIFEST_BYTES
from distca.contract.identity import Role
from tests import ROOT

TEXT = (ROOT / "docs" / "security.md").read_text()

_ROW = re.compile(r"^\| `(\w+/\w+)` \| ([-a-z, ]+) \| ([-a-z, ]*)\|$", re.MULTILINE)


def roles(cell: str) -> set[str]:
    return {role for role in re.split(r"[, ]+", cell.strip()) if role}


def test_the_table_of_methods_is_the_codes() -> None:
    documented = {m: (roles(who), roles(token)) for m, who, token in _ROW.findall(TEXT)}
    assert documented == {
        short_name(name): (set(policy.roles), set(policy.token_roles))
        for name, policy in POLICIES.items()
    }


def test_every_role_is_explained() -> None:
    for role in Role:
        assert f"| `{role}` |" in TEXT


def test_limits_are_the_defaults() -> None:
    access = AccessSettings()
    assert f"{access.registrations_per_second:g} a second" in TEXT
    assert f"{access.registration_burst} at once" in TEXT
    sizes = {policy.max_request_bytes for policy in POLICIES.values()}
    manifest_bytes = MAX_RANK_MANIFEST_BYTES + 64 * 2**10
    assert sizes == {64 * 2**10, 8 * 2**20, manifest_bytes}
    for size in ("64 KiB", "registrations 8 MiB", f"{manifest_bytes / 2**20:.1f} MiB"):
        assert size in TEXT
