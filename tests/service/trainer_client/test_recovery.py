"""Servers die while steps run: every result is that of the reference, and no step is run twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch

from core_attention.ca_task import MaskKind, Phase
from core_attention.manifest import RankManifest, Segment
from core_attention.shape import AttentionShape
from core_attention.tick import Tick
from tests.support.cluster import NODE_SHAPE, Cluster, Process, cluster
from tests.support.cut_manifests import in_halves, tree
from tests.support.team import Layer, Layers, Rows, StepResult, Team, assert_close
from tests.support.waiting import eventually
from trainer_client import checkpoint, core_attention
from trainer_client.errors import CoreAttentionFailed
from trainer_client.step.lane import require_step
from trainer_client.step.rank_steps import RankSteps
from trainer_client.step.running_step import RunningStep
from trainer_client.step.sent_tick import SentTick

N_LAYERS = 3

Hook = Callable[[RunningStep, Tick], None]


def cut(n_ranks: int) -> list[RankManifest]:
    """A document over both nano-batches of all ranks, and one over those of the last rank."""
    return in_halves(n_ranks, 170 * n_ranks + 9, 90)


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


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster"), 0) as running:
        yield running


@pytest.fixture
def servers(living: Cluster) -> Cluster:
    """Three attention nodes, whatever the test before has done to them. New ones have new names:
    a name is free only when the lease of the killed one has run out."""
    first = len(living.processes)
    missing = 3 - len(nodes_of(living))
    living.start_nodes([f"node-{number}" for number in range(first, first + missing)])
    return living


def nodes_of(servers: Cluster) -> list[Process]:
    """The attention nodes that run."""
    return [p for p in servers.processes[1:] if p.popen.poll() is None]


def on_tick(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    """Calls ``hook`` before a rank sends a tick."""
    send = RankSteps.send

    def hooked(
        self: RankSteps, running: RunningStep, tick: Tick, *rows: Any, **keys: Any
    ) -> SentTick:
        hook(running, tick)
        return send(self, running, tick, *rows, **keys)

    monkeypatch.setattr(RankSteps, "send", hooked)


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


PLACES = [
    (0, Phase.FORWARD, 1),
    (2, Phase.FORWARD, 1),
    (2, Phase.BACKWARD, 1),
    (0, Phase.BACKWARD, 1),
    # The first and the second tick of the call in the middle.
    (2, Phase.FORWARD, 2),
    (3, Phase.FORWARD, 2),
    (3, Phase.BACKWARD, 2),
    (2, Phase.BACKWARD, 2),
]
"""Layer, phase and head groups of a tick at which a server dies."""


@pytest.mark.parametrize("manifests", [spanning(3), cut(3)], ids=["spanning", "cut"])
@pytest.mark.parametrize("place", range(len(PLACES)))
def test_a_killed_server_costs_no_step(
    servers: Cluster, monkeypatch: pytest.MonkeyPatch, manifests: list[RankManifest], place: int
) -> None:
    """The rank that is there is the first or the last, so that each pair of choices occurs."""
    layer, phase, head_groups = PLACES[place]
    rank = 2 * ((place + len(manifests[0].nano_batches[0])) % 2)
    with Team(
        servers, 3, NODE_SHAPE, n_layers=N_LAYERS, placement="pool", head_groups=head_groups
    ) as team:
        kill_at(monkeypatch, [nodes_of(servers)[0]], rank=rank, layer=layer, phase=phase)
        assert max(recoveries(team.check(manifests))) >= 1
        monkeypatch.undo()
        assert recoveries(team.check(manifests, seed=1)) == [0, 0, 0]


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize(("rank", "nano_batch"), [(0, 0), (2, 1)])
def test_a_killed_server_costs_no_step_of_a_tree(
    servers: Cluster, monkeypatch: pytest.MonkeyPatch, phase: Phase, rank: int, nano_batch: int
) -> None:
    with Team(servers, 3, NODE_SHAPE, n_layers=N_LAYERS, placement="pool") as team:
        victims = nodes_of(servers)[:1]
        kill_at(monkeypatch, victims, rank=rank, layer=1, phase=phase, nano_batch=nano_batch)
        assert max(recoveries(team.check(tree()))) >= 1


@pytest.mark.parametrize("nano_batch", [0, 1])
def test_checkpointed_layers_of_cut_documents_are_replayed(
    servers: Cluster, monkeypatch: pytest.MonkeyPatch, nano_batch: int
) -> None:
    with Team(
        servers, 3, NODE_SHAPE, n_layers=N_LAYERS, placement="mixed", checkpointed=True
    ) as team:
        kill_at(
            monkeypatch,
            nodes_of(servers)[:1],
            rank=0,
            layer=1,
            phase=Phase.BACKWARD,
            nano_batch=nano_batch,
        )
        assert max(recoveries(team.check(cut(3)))) >= 1


@pytest.mark.parametrize("n_victims", [2, 3])
def test_several_servers_die_at_once(
    servers: Cluster, monkeypatch: pytest.MonkeyPatch, n_victims: int
) -> None:
    """Without any server left the ranks compute at home, and return to the pool."""
    with Team(servers, 3, NODE_SHAPE, n_layers=N_LAYERS, placement="pool") as team:
        victims = nodes_of(servers)[:n_victims]
        kill_at(monkeypatch, victims, rank=1, layer=1, phase=Phase.BACKWARD)
        assert max(recoveries(team.check(spanning(3)))) >= 1
        monkeypatch.undo()
        newcomer = servers.start_node("newcomer")
        result = team.check(spanning(3), seed=1)
        served = {s.server_id for running in result.running for s in running.plan.servers}
        assert "newcomer" in served
        assert not any(name.startswith("test-") for name in served)
    newcomer.terminate()


CAPPED = replace(NODE_SHAPE, softcap=1.5)
FULL = replace(NODE_SHAPE, mask=MaskKind.FULL)
WITH_SINKS = [Layer(), Layer(sinks=True), Layer(sinks=True)]
WINDOWS = [Layer(window=40), Layer(), Layer(window=40)]


@pytest.mark.parametrize(
    ("shape", "layers", "n_victims", "phase"),
    [
        (CAPPED, WITH_SINKS, 1, Phase.BACKWARD),
        (CAPPED, WITH_SINKS, 3, Phase.FORWARD),
        (FULL, [Layer()] * N_LAYERS, 1, Phase.FORWARD),
        (FULL, [Layer()] * N_LAYERS, 3, Phase.BACKWARD),
        (NODE_SHAPE, WINDOWS, 1, Phase.BACKWARD),
        (NODE_SHAPE, WINDOWS, 3, Phase.FORWARD),
    ],
)
def test_what_scores_go_through_survives_a_lost_server(
    servers: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    shape: AttentionShape,
    layers: list[Layer],
    n_victims: int,
    phase: Phase,
) -> None:
    """On the servers that are left, and at home where none is."""
    with Team(servers, 3, shape, layers=layers, serve_windows=True, placement="pool") as team:
        victims = nodes_of(servers)[:n_victims]
        kill_at(monkeypatch, victims, rank=1, layer=1, phase=phase)
        assert max(recoveries(team.check(spanning(3)))) >= 1


def test_a_rank_that_is_ahead_serves_those_behind_without_its_own_rows(
    servers: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that share no document: the one ahead keeps nothing of its complete ticks, and its own
    server runs the same ticks for the other one."""
    manifests = [RankManifest.from_lengths(0, rank, [[200, 57], [150, 90]]) for rank in range(2)]
    ahead = threading.Event()

    def hook(running: RunningStep, tick: Tick) -> None:
        if running.rank == 1:
            assert ahead.wait(30.0)
        elif tick == Tick(0, 0, 1, Phase.BACKWARD):
            for node in nodes_of(servers):
                node.kill()
            ahead.set()

    with Team(servers, 2, NODE_SHAPE, n_layers=N_LAYERS, placement="pool") as team:
        on_tick(monkeypatch, hook)
        assert max(recoveries(team.check(manifests))) >= 1


def test_a_step_without_a_backward_pass_is_replayed(
    servers: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks with the heads of documents may be at its end when another one has to begin anew."""
    with Team(servers, 3, NODE_SHAPE, n_layers=N_LAYERS, placement="pool") as team:
        expected = team.run(spanning(3), backward=False)
        kill_at(monkeypatch, [nodes_of(servers)[0]], rank=2, layer=1, phase=Phase.FORWARD, step=1)
        result = team.run(spanning(3), backward=False)
        assert max(recoveries(result)) >= 1
        for key, rows in expected.rows.items():
            assert_close("o", result.rows[key]["o"], rows["o"].double())


def one_after_the_other(tokens: int) -> list[RankManifest]:
    """A document over three ranks, in one nano-batch."""
    return [
        RankManifest(0, rank, ((Segment(1, 3 * tokens, rank * tokens, tokens),),))
        for rank in range(3)
    ]


def kill_behind(monkeypatch: pytest.MonkeyPatch, victims: Sequence[Process], *, step: int) -> None:
    """Kills ``victims`` when rank 2 comes to layer 1 and rank 0, which needs nobody, to the
    last."""
    ahead = threading.Event()

    def hook(running: RunningStep, tick: Tick) -> None:
        if tick.step != step or tick.phase is not Phase.FORWARD:
            return
        if running.rank == 0 and tick.layer == N_LAYERS - 1:
            ahead.set()
        elif running.rank == 2 and tick.layer == 1:
            assert ahead.wait(30.0)
            for victim in victims:
                victim.kill()

    on_tick(monkeypatch, hook)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("placement", ["pool", "mixed"])
def test_one_buffer_for_the_keys_of_all_layers_is_replayed_as_it_was(
    servers: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    placement: str,
    mode: Callable[[], AbstractContextManager[Any]],
) -> None:
    """As references and evaluations keep them. A rank that is at its last layer sends those of the
    layer that another one comes to."""

    def forward(self: Layers, layers: Sequence[Rows]) -> list[torch.Tensor]:
        with mode():
            k, v = (torch.empty_like(layers[0][name]) for name in "kv")
            return [
                core_attention(rows["q"].detach(), k.copy_(rows["k"]), v.copy_(rows["v"])).clone()
                for rows in layers
            ]

    with Team(
        servers, 3, NODE_SHAPE, n_layers=N_LAYERS, placement=placement, n_nano_batches=1
    ) as team:
        expected = team.run(one_after_the_other(96), backward=False)
        monkeypatch.setattr(Layers, "forward", forward)
        victims = nodes_of(servers)[: 2 if placement == "pool" else 3]
        kill_behind(monkeypatch, victims, step=1)
        result = team.run(one_after_the_other(96), backward=False)
        assert max(recoveries(result)) >= 1
        for key, rows in expected.rows.items():
            assert_close("o", result.rows[key]["o"], rows["o"].double())


def test_keys_that_were_changed_are_not_replayed(
    servers: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd keeps them, and would refuse them in the backward pass."""

    def forward(self: Layers, layers: Sequence[Rows]) -> list[torch.Tensor]:
        outputs = []
        for layer, rows in enumerate(layers):
            k = rows["k"] * 1.0
            outputs.append(core_attention(rows["q"], k, rows["v"]))
            if layer == 1:
                k.mul_(0)
        return outputs

    monkeypatch.setattr(Layers, "forward", forward)
    with Team(
        servers, 3, NODE_SHAPE, n_layers=N_LAYERS, placement="pool", n_nano_batches=1
    ) as team:
        kill_behind(monkeypatch, nodes_of(servers)[:2], step=0)
        for future in team.start(one_after_the_other(96)):
            with pytest.raises(CoreAttentionFailed):
                future.result(60)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_keys_that_are_handed_over_are_those_that_were_computed(
    servers: Cluster, monkeypatch: pytest.MonkeyPatch, checkpointed: bool
) -> None:
    """The second nano-batch takes them when the first has come to its end."""

    def forward(self: Layers, layers: Sequence[Rows]) -> list[torch.Tensor]:
        def layer(rows: Rows) -> torch.Tensor:
            q, k, v = (rows[name] * 1.0 for name in "qkv")
            o = core_attention(q, k, v)
            k.mul_(0)
            v.mul_(0)
            return o

        if checkpointed:
            return [checkpoint(layer, rows) for rows in layers]
        with torch.no_grad():
            return [layer(rows) for rows in layers]

    manifests = [RankManifest(0, 0, ((Segment(1, 100, 0, 60),), (Segment(1, 100, 60, 40),)))]
    with Team(
        servers, 1, NODE_SHAPE, n_layers=N_LAYERS, placement="in-place", interleave=False
    ) as team:
        expected = team.run(manifests, backward=False)
        monkeypatch.setattr(Layers, "forward", forward)
        if checkpointed:
            team.check(manifests)
            return
        result = team.run(manifests, backward=False)
        for key, rows in expected.rows.items():
            assert_close("o", result.rows[key]["o"], rows["o"].double())


def test_gradients_that_were_changed_are_not_replayed(
    servers: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has a layer's gradients, and writes over that of its output, which rank 1 needs."""
    last = Tick(0, N_LAYERS - 1, 0, Phase.BACKWARD)
    begun, wait = threading.Event(), RankSteps.wait

    def hooked(self: RankSteps, running: RunningStep, sent: SentTick) -> None:
        if (running.rank, sent.tick) == (1, last):
            # Until the recovery has come here, the replies are not taken in.
            epoch = self.epoch
            begun.set()
            eventually(lambda: self.epoch > epoch, 30.0)
        wait(self, running, sent)

    def layer(self: Layers, rows: Rows, kind: Layer) -> torch.Tensor:
        q = rows["q"] * 1.0
        if require_step().rank == 0:
            q.register_hook(lambda _: change(rows["do"]))
        return core_attention(q, rows["k"], rows["v"])

    changed: list[torch.Tensor] = []

    def change(do: torch.Tensor) -> None:
        if not changed:
            changed.append(do)
            assert begun.wait(30.0)
            for node in nodes_of(servers)[:2]:
                node.kill()
            do.mul_(0)

    manifests = [RankManifest(0, rank, ((Segment(1, 200, rank * 100, 100),),)) for rank in range(2)]
    with Team(
        servers, 2, NODE_SHAPE, n_layers=N_LAYERS, placement="pool", n_nano_batches=1
    ) as team:
        monkeypatch.setattr(Layers, "_layer", layer)
        monkeypatch.setattr(RankSteps, "wait", hooked)
        futures = team.start(manifests)
        for future in futures:
            with pytest.raises(CoreAttentionFailed):
                future.result(60)


def test_a_step_given_up_by_one_rank_fails_for_those_who_need_its_rows(
    servers: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hook(running: RunningStep, tick: Tick) -> None:
        if running.rank == 1 and tick == Tick(0, 1, 0, Phase.FORWARD):
            raise KeyError("a mistake of the model")

    with Team(
        servers,
        3,
        NODE_SHAPE,
        n_layers=N_LAYERS,
        placement="pool",
        # Longer than a lease, as it must be.
        tick_timeout_seconds=16.0,
    ) as team:
        on_tick(monkeypatch, hook)
        futures = team.start(spanning(3))
        with pytest.raises(KeyError):
            futures[1].result(60)
        for rank in (0, 2):
            with pytest.raises(CoreAttentionFailed):
                futures[rank].result(60)
        monkeypatch.undo()
        team.check(spanning(3), seed=1)
