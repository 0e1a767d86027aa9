"""What a certificate's URIs say about role and name."""

from __future__ import annotations

import pytest

from distca.contract.identity import Identity, Role, identity_of


@pytest.mark.parametrize("role", Role)
def test_every_role_comes_back_from_its_uri(role: Role) -> None:
    identity = Identity(role=role, name="team-a.1_x")
    assert identity_of([identity.uri]) == identity


def test_uris_of_others_are_no_obstacle() -> None:
    uris = ["spiffe://cluster.local/ns/x/sa/y", "spiffe://distca/server/pool"]
    assert identity_of(uris) == Identity(role=Role.SERVER, name="pool")


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["spiffe://other/trainer/a"],
        ["spiffe://distca/trainer"],
        ["spiffe://distca/trainer/"],
        ["spiffe://distca/admin/a"],
        ["spiffe://distca/trainer/a/b"],
        ["spiffe://distca/trainer/a\n"],
        ["spiffe://distca/trainer/" + "a" * 129],
        ["spiffe://distca/Trainer/a"],
        ["https://distca/trainer/a"],
        # Two of ours are ambiguous, even if one of them is of no use.
        ["spiffe://distca/trainer/a", "spiffe://distca/operator/a"],
        ["spiffe://distca/trainer/a", "spiffe://distca/x"],
    ],
)
def test_anything_else_gives_no_rights(uris: list[str]) -> None:
    assert identity_of(uris) is None


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a" * 129])
def test_names_that_do_not_fit_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name is"):
        Identity(role=Role.TRAINER, name=name)
