"""Layers at home over documents that are cut between ranks: parity with float64, and what happens
when the connections between ranks break."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core_attention.manifest import RankManifest, Segment
from core_attention.tick import step_of_tag
from tests.cluster.trainer_client.rank_process import run_ranks
from tests.service.trainer_client.test_cut_documents import rank_manifests
from tests.service.trainer_client.test_parity import PLACEMENTS, make_shape
from tests.support.cluster import Cluster, keep_profile, on_this_host
from tests.support.cut_manifests import in_halves, pieces
from tests.support.team import Layer, Team, compare
from trainer_client import Session
from trainer_client.errors import CoreAttentionFailed
from trainer_client.step.neighbours import EdgeMessage, Neighbours

WINDOW = 16

LAYERS = [
    Layer(window=WINDOW, sinks=True, softcap=1.5),
    Layer(),
    Layer(chunk=WINDOW, sinks=True),
    Layer(window=1),
    Layer(window=2),
    Layer(window=200),
    Layer(chunk=31, softcap=2.0),
]


THREE_RANKS = {
    "one document": in_halves(3, 307),
    "of six tokens": in_halves(3, 6),
    "pieces shorter than the window": in_halves(3, 60),
    "a window a piece": in_halves(3, 6 * WINDOW),
    "one token more": in_halves(3, 6 * WINDOW + 6),
    "among others": in_halves(3, 40, 3, 120, 2, 1, 300, 7),
    "many tiny documents": in_halves(3, *[1, 2, 3, 1, 5] * 6, 64, *[2, 1] * 8),
    "against the order of ranks": pieces(
        "1:60-90/90 | 2:33-50/50", "1:30-60/90 | 2:10-33/50", "1:0-30/90 | 2:0-10/50"
    ),
    "in pieces anywhere": pieces(
        "9:20-25/80 2:0-10/31 9:0-10/80 | 9:70-80/80 2:30-31/31",
        "9:10-20/80 | 9:40-47/80 2:10-30/31",
        "9:25-40/80 | 9:47-70/80",
    ),
    "ranks without rows": pieces("1:0-50/90 |", "|", "1:50-90/90 |"),
}


@pytest.fixture(scope="module", params=PLACEMENTS)
def team(request: pytest.FixtureRequest, pool_of_four: Cluster) -> Iterator[Team]:
    with Team(pool_of_four, 3, make_shape(), layers=LAYERS, placement=request.param) as running:
        yield running


@pytest.mark.parametrize("case", THREE_RANKS)
def test_documents_over_ranks_match_the_reference(team: Team, case: str) -> None:
    team.check(THREE_RANKS[case])


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(manifests=rank_manifests(3), seed=st.integers(0, 2**16))
def test_random_pieces_match_the_reference(
    team: Team, manifests: list[RankManifest], seed: int
) -> None:
    team.check(manifests, seed=seed)


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_checkpoints_and_turns_match_the_reference(
    pool_of_four: Cluster, checkpointed: bool, interleave: bool
) -> None:
    with Team(
        pool_of_four,
        3,
        make_shape(),
        layers=LAYERS,
        placement="mixed",
        checkpointed=checkpointed,
        interleave=interleave,
    ) as team:
        team.check(THREE_RANKS["one document"])
        team.check(THREE_RANKS["in pieces anywhere"])


def test_one_nano_batch_and_checksums_match_the_reference(pool_of_four: Cluster) -> None:
    manifests = [
        RankManifest(0, rank, ((Segment(1, 120, 40 * rank, 40), Segment(2 + rank, 9, 0, 9)),))
        for rank in range(3)
    ]
    with Team(
        pool_of_four, 3, make_shape(), layers=LAYERS, n_nano_batches=1, checksums=True
    ) as team:
        team.check(manifests)
        team.check(manifests, seed=1)


def test_forward_only_steps_match_the_reference(pool_of_four: Cluster) -> None:
    manifests = in_halves(3, 303)
    with Team(pool_of_four, 3, make_shape(), layers=LAYERS) as team:
        with_backward = team.run(manifests)
        alone = team.run(manifests, backward=False)
    for key, rows in alone.rows.items():
        assert rows["o"].allclose(with_backward.rows[key]["o"], atol=1e-6)


def neighbours_of(session: Session) -> Neighbours:
    return session._neighbours


def cut_all(team: Team) -> int:
    """Breaks the connections between the ranks; returns how many there were."""
    found = [
        neighbour.connection
        for session in team.sessions
        for neighbour in list(neighbours_of(session)._neighbours.values())
        if neighbour.is_connected
    ]
    for connection in found:
        assert connection is not None
        connection.close("cut by a test")
    return len(found)


@pytest.mark.parametrize("phase", ["FORWARD", "BACKWARD"])
def test_connections_that_break_are_opened_anew(
    pool_of_four: Cluster, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between messages that were sent and those that were taken: they are sent again."""
    taken = Neighbours.take
    cuts: list[int] = []

    def take_after_a_cut(self: Neighbours, message: EdgeMessage, *args: object) -> object:
        if message.tick.phase.name == phase and len(cuts) < 6:
            cuts.append(cut_all(ranks))
        return taken(self, message, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Neighbours, "take", take_after_a_cut)
    with Team(pool_of_four, 3, make_shape(), layers=LAYERS) as ranks:
        ranks.check(THREE_RANKS["one document"])
        ranks.check(THREE_RANKS["against the order of ranks"])
    assert any(cuts)


def test_waits_for_edge_keys_are_in_the_report(pool_of_four: Cluster) -> None:
    with Team(pool_of_four, 2, make_shape(), layers=[Layer(window=8), Layer()]) as team:
        over_ranks = team.check(in_halves(2, 100)).running
        apart = team.check(in_halves(2, 25, 25, 25, 25)).running
    waits = [running.report.edge_wait_seconds for running in over_ranks if running.report]
    assert len(waits) == 2
    assert all(0.0 < seconds < 20.0 for seconds in waits)
    named = [event.detail for event in over_ranks[0].trace if event.name == "edge keys"]
    assert (
        "step 0 nano-batch 0: gradients of keys from rank 1, of layer 0 of those at home" in named
    )
    assert [running.report.edge_wait_seconds for running in apart if running.report] == [0.0, 0.0]


def test_messages_are_kept_until_every_rank_has_finished_the_step(pool_of_four: Cluster) -> None:
    with Team(pool_of_four, 3, make_shape(), layers=LAYERS) as team:
        for _ in range(4):
            team.run(THREE_RANKS["pieces shorter than the window"])
        kept = {
            step_of_tag(tag)
            for session in team.sessions
            for neighbour in neighbours_of(session)._neighbours.values()
            for tag in (*neighbour.kept, *neighbour.received)
        }
    assert 0 not in kept
    assert 1 not in kept


def test_keys_that_do_not_come_are_missed_in_time(
    pool_of_four: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Neighbours, "send", lambda self, message, layout, tensors: None)
    with Team(pool_of_four, 2, make_shape(), layers=[Layer(window=8), Layer()]) as team:
        for session in team.sessions:
            neighbours_of(session)._deadline_seconds = 1.0
        with pytest.raises(CoreAttentionFailed):
            team.run([RankManifest(0, r, ((Segment(1, 40, 20 * r, 20),), ())) for r in range(2)])


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.timeout(400),
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_ranks_in_processes_of_their_own_match_the_reference(
    pool_of_four: Cluster, tmp_path: Path, device: str
) -> None:
    """On one GPU or two, with streams and cuda_ipc between them."""
    shape, devices = make_shape(), ["cpu"] * 2
    if device == "cuda":
        shape = replace(make_shape(8, 2, "bfloat16"), head_dim=64, head_dim_v=64)
        devices = [f"cuda:{rank % torch.cuda.device_count()}" for rank in range(2)]
    for each in devices:
        keep_profile(pool_of_four.folder, shape, each)
    layers = [Layer(window=40, sinks=True), Layer(), Layer(window=1000), Layer(chunk=31)]
    steps = [
        in_halves(2, 301),
        in_halves(2, 40, 3, 120, 2, 1, 3000 if device == "cuda" else 300, 7),
        in_halves(2, *[1, 2, 3, 1, 5] * 6, 64, *[2, 1] * 8),
    ]
    options = {
        "control_plane": pool_of_four.address,
        "job": f"processes-{device}",
        "n_layers": 1,
        "shape": shape,
        **on_this_host(pool_of_four.folder),
    }
    found = run_ranks(tmp_path, options, layers, steps, devices)
    for manifests, rows in zip(steps, found, strict=True):
        for number, layer in enumerate(layers):
            compare(manifests, rows, number, layer, shape, shape.default_softmax_scale)
