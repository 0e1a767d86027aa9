"""What users see when something is wrong: a named error, soon, and never a hang."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core_attention.ca_task import Phase
from core_attention.manifest import RankManifest
from data_plane.transport import TransportError
from distca.contract import rpc
from tests.service.trainer_client.test_recovery import kill_at
from tests.support.cluster import NODE_SHAPE, Cluster, cluster
from tests.support.errors import fails
from tests.support.team import Team
from trainer_client import (
    CoreAttentionFailed,
    Placement,
    PlanNotReady,
    Session,
    SessionError,
    SessionOptions,
    core_attention,
)

SOON_SECONDS = 15.0
"""Far below the 30 s within which every failure must be told; two busy cores need the slack."""


def whole(n_ranks: int = 2) -> list[RankManifest]:
    return [RankManifest.from_lengths(0, rank, [[300], [200]]) for rank in range(n_ranks)]


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of its own, to break."""
    with cluster(tmp_path, 2, lease_seconds=3.0) as running:
        yield running


def test_a_stopped_node_costs_no_step(doomed: Cluster) -> None:
    with Team(
        doomed, 2, NODE_SHAPE, placement="pool", ping_quiet_seconds=0.5, ping_timeout_seconds=1.5
    ) as team:
        team.run(whole())
        doomed.processes[1].popen.send_signal(signal.SIGSTOP)
        result = team.check(whole())
        assert max(running.recoveries for running in result.running) >= 1


@pytest.mark.parametrize("phase", Phase)
def test_what_lost_servers_owe_is_computed_at_home_without_a_control_plane(
    doomed: Cluster, monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    with Team(doomed, 2, NODE_SHAPE, placement="pool") as team:
        team.run(whole())
        kill_at(monkeypatch, doomed.processes, rank=0, layer=0, phase=phase, step=1)
        # The other rank may have all replies by then.
        assert team.check(whole()).running[0].machine.at_home


def test_a_step_that_was_not_submitted_is_named(pool_of_four: Cluster) -> None:
    with Team(pool_of_four, 1, NODE_SHAPE, placement="pool") as team:
        with pytest.raises(PlanNotReady), team.sessions[0].step(5):
            pass
        with pytest.raises(ValueError):
            team.sessions[0].submit(whole()[1])
        with pytest.raises(ValueError):
            team.sessions[0].submit(RankManifest.from_lengths(0, 0, [[3]]))


def test_backward_outside_of_its_step_is_refused(pool_of_four: Cluster) -> None:
    with Team(pool_of_four, 1, NODE_SHAPE, placement="pool", n_nano_batches=1) as team:
        session = team.sessions[0]
        session.submit(RankManifest.from_lengths(0, 0, [[30]]))
        q = torch.zeros(30, 4, 16, requires_grad=True)
        k = torch.zeros(30, 2, 16)
        with pytest.raises(SessionError), session.step(0):
            o = core_attention(q, k, k.clone())
        with pytest.raises(CoreAttentionFailed):
            o.sum().backward()


def test_a_taken_port_is_named(pool_of_four: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TransportError) as refused:
            Team(pool_of_four, 1, NODE_SHAPE, placement="in-place", data_port=port)
    assert refused.value.peer == f"127.0.0.1:{port}"


def test_no_control_plane_is_told_soon(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    began = time.monotonic()
    with fails(rpc.Reason.UNAVAILABLE):
        Session.open(
            SessionOptions(
                control_plane=f"127.0.0.1:{port}",
                job="nobody",
                rank=0,
                n_ranks=1,
                n_layers=1,
                shape=NODE_SHAPE,
                placement=Placement.POOL,
                start_timeout_seconds=1.0,
            )
        )
    assert time.monotonic() - began < SOON_SECONDS


@pytest.mark.parametrize(
    "change", [{"control_plane": "nowhere"}, {"ca_file": Path("/nowhere/ca.pem")}]
)
def test_a_session_that_cannot_be_made_leaves_no_thread(change: dict[str, Any]) -> None:
    before = set(threading.enumerate())
    options = {"control_plane": "localhost:1", "job": "j", "rank": 0, "n_ranks": 1, "n_layers": 1}
    with pytest.raises((ValueError, OSError)):
        Session.open(SessionOptions(**{**options, "shape": NODE_SHAPE, **change}))
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert "ucxx-owner" not in left


def test_a_fork_leaves_the_session_that_it_inherits_alone(pool_of_four: Cluster) -> None:
    team = Team(pool_of_four, 1, NODE_SHAPE, placement="pool")
    session = team.sessions[0]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(SessionError), session.step(0):
                pass
            session.close()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise AssertionError("the fork hangs in close")
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    team.run(whole(1))
    team.close()


def test_closing_twice_leaves_no_thread(pool_of_four: Cluster) -> None:
    before = {thread.name for thread in threading.enumerate()}
    team = Team(pool_of_four, 1, NODE_SHAPE, placement="mixed")
    team.run(whole(1))
    team.close()
    team.sessions[0].close()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        left = {t.name for t in threading.enumerate() if t.name.startswith(("distca", "ucxx"))}
        if not left - before:
            return
        time.sleep(0.1)
    raise AssertionError(f"threads are left: {left - before}")
