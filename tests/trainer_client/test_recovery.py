"""Servers die while steps run: every result is that of the reference, and no step is run twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from core_attention.ca_task import Phase
from core_attention.manifest import RankManifest, Segment
from core_attention.tick import Tick
from tests.cluster import NODE_SHAPE, Cluster, Process, cluster
from tests.team import StepResult, Team
from trainer_client.lane_log import SentTick
from trainer_client.replies import Tensors
from trainer_client.running_step import RunningStep

N_LAYERS = 3

Hook = Callable[[RunningStep, Tick], None]


def spanning(n_ranks: int, tokens: int = 96) -> list[RankManifest]:
    """A long document over all ranks in nano-batch 0, a chain of documents over neighbours in
    nano-batch 1, and documents of one rank beside them."""
    manifests = []
    for rank in range(n_ranks):
        long = Segment(1, n_ranks * tokens, rank * tokens, tokens)
        chain = []
        if rank > 0:
            chain.append(Segment(100 + rank - 1, 50, 30, 20))
        if rank < n_ranks - 1:
            chain.append(Segment(100 + rank, 50, 0, 30))
        own = [Segment((rank + 1) << 32 | n, length, 0, length) for n, length in enumerate((1, 57))]
        manifests.append(RankManifest(0, rank, ((long, own[0]), (*chain, own[1]))))
    return manifests


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path, 3) as running:
        yield running


def on_tick(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    """Calls ``hook`` before a rank sends a tick."""
    send = RunningStep.send

    def hooked(self: RunningStep, tick: Tick, inputs: Tensors, outputs: Tensors) -> SentTick:
        hook(self, tick)
        return send(self, tick, inputs, outputs)

    monkeypatch.setattr(RunningStep, "send", hooked)


def kill_at(
    monkeypatch: pytest.MonkeyPatch,
    victims: Sequence[Process],
    *,
    rank: int,
    layer: int,
    phase: Phase,
    step: int = 0,
    nano_batch: int = 1,
) -> None:
    """Kills ``victims`` when ``rank`` comes to a tick."""
    once = threading.Lock()

    def hook(running: RunningStep, tick: Tick) -> None:
        if (running.rank, tick) == (rank, Tick(step, layer, nano_batch, phase)):
            assert once.acquire(blocking=False)
            for victim in victims:
                victim.kill()

    on_tick(monkeypatch, hook)


def recoveries(result: StepResult) -> list[int]:
    return [running.recoveries for running in result.running]


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("layer", "phase"),
    [(0, Phase.FORWARD), (2, Phase.FORWARD), (2, Phase.BACKWARD), (0, Phase.BACKWARD)],
)
def test_a_killed_server_costs_no_step(
    servers: Cluster, monkeypatch: pytest.MonkeyPatch, rank: int, layer: int, phase: Phase
) -> None:
    with Team(servers, 3, NODE_SHAPE, n_layers=N_LAYERS, placement="pool") as team:
        team.check(spanning(3))
        kill_at(monkeypatch, [servers.processes[1]], rank=rank, layer=layer, phase=phase, step=1)
        result = team.check(spanning(3), seed=1)
        assert max(recoveries(result)) >= 1
        monkeypatch.undo()
        assert recoveries(team.check(spanning(3), seed=2)) == [0, 0, 0]
