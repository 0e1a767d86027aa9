"""Parity over the nixl transport: every placement, and a server that dies in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from core_attention.ca_task import Phase
from tests.service.trainer_client.test_parity import CASES, PLACEMENTS, make_shape, spanning
from tests.service.trainer_client.test_recovery import kill_at, nodes_of, recoveries
from tests.support.cluster import Cluster, cluster
from tests.support.team import Team


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("nixl"), 0) as running:
        running.start_nodes(["node-0", "node-1"], transport="nixl")
        yield running


@pytest.fixture(scope="module", params=PLACEMENTS)
def team(request: pytest.FixtureRequest, pool: Cluster) -> Iterator[Team]:
    with Team(
        pool, 2, make_shape(), n_layers=2, placement=request.param, transport="nixl"
    ) as running:
        yield running


@pytest.mark.parametrize("case", CASES)
def test_every_placement_matches_the_reference(team: Team, case: str) -> None:
    team.check(CASES[case])


def test_a_killed_server_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(tmp_path, 0) as servers:
        servers.start_nodes(["node-0", "node-1"], transport="nixl")
        with Team(servers, 2, make_shape(), n_layers=2, placement="pool", transport="nixl") as team:
            team.check(spanning(2, 601))
            victims = nodes_of(servers)[:1]
            kill_at(monkeypatch, victims, rank=1, layer=1, phase=Phase.BACKWARD, step=1)
            assert max(recoveries(team.check(spanning(2, 601), seed=1))) >= 1


def test_a_limited_pool_gives_the_same_results(tmp_path: Path) -> None:
    """Its blocks are given back and made anew, at addresses that peers have seen before."""
    with cluster(tmp_path, 0) as servers:
        servers.start_nodes(["node-0"], transport="nixl", buffer_limit_bytes=600_000)
        with Team(servers, 2, make_shape(), n_layers=2, placement="pool", transport="nixl") as team:
            for length in (601, 200, 577, 90, 431):
                team.check(spanning(2, length))
