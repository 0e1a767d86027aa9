"""Servers are lost in every way that there is, and each loss is counted by its cause."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attention_node.exchange import LocalReply
from attention_node.open_tick import TickGivenUp
from core_attention.manifest import RankManifest
from distca.contract.server_loss import LossCause
from tests.service.trainer_client.test_recovery import spanning
from tests.support.cluster import NODE_SHAPE, Cluster, cluster
from tests.support.team import Team
from tests.support.waiting import eventually


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes."""
    with cluster(tmp_path, 2, lease_seconds=3.0) as running:
        yield running


def counted(servers: Cluster) -> set[LossCause]:
    """The causes that ranks have reported."""
    return {cause for cause in LossCause if servers.failures_detected(cause)}


def test_a_server_that_cannot_be_reached(servers: Cluster) -> None:
    with Team(servers, 2, NODE_SHAPE, placement="pool") as team:
        submitted = team.submit(spanning(2))
        eventually(lambda: all(session._steps._machine.outline_of(0) for session in team.sessions))
        servers.processes[1].kill()
        for future in team.start_submitted(submitted):
            future.result(60)
    assert counted(servers) == {LossCause.UNREACHABLE}


def test_a_server_that_answers_pings_but_sends_no_reply(servers: Cluster) -> None:
    servers.processes[1].kill()
    servers.processes[2].kill()
    servers.start_node("faulty", prelude=_NO_REPLY)
    with Team(
        servers,
        1,
        NODE_SHAPE,
        placement="pool",
        tick_timeout_seconds=11.0,
        ping_quiet_seconds=0.5,
        ping_timeout_seconds=1.5,
        connect_timeout_seconds=3.0,
    ) as team:
        team.check(alone())
    assert LossCause.DEADLINE in counted(servers)


def test_a_tick_that_the_rank_s_own_server_gives_up(servers: Cluster) -> None:
    with Team(servers, 1, NODE_SHAPE, placement="in-place") as team:
        ticks = team.sessions[0]._in_place.ticks
        give_up = ticks.submit_local

        def once(*arguments: Any) -> LocalReply:
            ticks.submit_local = give_up  # type: ignore[method-assign]
            raise TickGivenUp("no memory")

        ticks.submit_local = once  # type: ignore[assignment, method-assign]
        team.check(alone())
    assert counted(servers) == {LossCause.OWN_SERVER}


def alone() -> list[RankManifest]:
    return [RankManifest.from_lengths(0, 0, [[40], [9]])]


_NO_REPLY = """
from attention_node.open_tick import OpenTick
OpenTick._reply = lambda self, rank: None
"""
