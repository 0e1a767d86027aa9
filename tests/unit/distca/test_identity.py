"""What a certificate's URIs say about role and name, and the one rule for all names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attention_node.settings import NodeSettings
from control_plane.jobs.membership import checked_id
from core_attention.shape import parse_shape
from distca.apps.local.settings import LocalSettings
from distca.apps.train.settings import ServiceSettings
from distca.contract.identity import Identity, Role, identity_of
from trainer_client.options import SessionOptions


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
        ["spiffe://distca/trainer/" + "a" * 101],
        ["spiffe://distca/trainer/.."],
        ["spiffe://distca/server/run.rank-0"],
        ["spiffe://distca/Trainer/a"],
        ["https://distca/trainer/a"],
        # Two of ours are ambiguous, even if one of them is of no use.
        ["spiffe://distca/trainer/a", "spiffe://distca/operator/a"],
        ["spiffe://distca/trainer/a", "spiffe://distca/x"],
    ],
)
def test_anything_else_gives_no_rights(uris: list[str]) -> None:
    assert identity_of(uris) is None


NO_NAMES = ["a/b", "a b", "a\n", ".", "..", ".git", "-rf", "run.rank-0", "a" * 101]


def job(name: str) -> None:
    shape = parse_shape("1:1:8:float32")
    SessionOptions(control_plane="h:1", job=name, rank=0, n_ranks=1, n_layers=1, shape=shape)


NAMED: dict[str, Callable[[str], object]] = {
    "job": job,
    "name": lambda name: Identity(role=Role.TRAINER, name=name),
    "server_id": lambda name: NodeSettings(
        control_plane="h:1", profile_shapes=(parse_shape("1:1:8:float32"),), server_id=name
    ),
    "run_dir": lambda name: ServiceSettings(control_plane="h:1", run_dir=Path("runs") / name),
    "local name": lambda name: LocalSettings(name=name),
    "wire": lambda name: checked_id("server_id", name),
}
"""What takes a name of a job, server or tenant, on creation."""


@pytest.mark.parametrize("name", NO_NAMES)
@pytest.mark.parametrize("named", NAMED)
def test_names_obey_one_rule_wherever_they_are_given(named: str, name: str) -> None:
    if (named, name) in (("run_dir", "."), ("run_dir", "a/b")):
        pytest.skip("a path in which the last part is another one")
    with pytest.raises(ValueError):
        NAMED[named](name)


@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("name", ["a", "_a-1.b", "rank-0", "run.rank-a", "a" * 100])
def test_other_names_are_taken(named: str, name: str) -> None:
    NAMED[named](name)
