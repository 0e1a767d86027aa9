"""Layers with windows that servers compute, over documents that are cut between ranks: parity with
float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core_attention.manifest import RankManifest, Segment
from tests.cluster.trainer_client.rank_process import run_ranks
from tests.service.trainer_client.test_cut_documents import rank_manifests
from tests.service.trainer_client.test_parity import PLACEMENTS, make_shape
from tests.support.cluster import Cluster, keep_profile, on_this_host
from tests.support.cut_manifests import in_halves, pieces
from tests.support.team import Layer, Team, compare
from trainer_client import SessionError

WINDOW = 16

LAYERS = [
    Layer(window=WINDOW, sinks=True),
    Layer(),
    Layer(window=1),
    Layer(window=2),
    Layer(window=200),
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
    with Team(
        pool_of_four, 3, make_shape(), layers=LAYERS, serve_windows=True, placement=request.param
    ) as running:
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
        serve_windows=True,
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
        pool_of_four,
        3,
        make_shape(),
        layers=LAYERS,
        serve_windows=True,
        n_nano_batches=1,
        checksums=True,
    ) as team:
        team.check(manifests)
        team.check(manifests, seed=1)


def test_forward_only_steps_match_the_reference(pool_of_four: Cluster) -> None:
    manifests = in_halves(3, 303)
    with Team(pool_of_four, 3, make_shape(), layers=LAYERS, serve_windows=True) as team:
        with_backward = team.run(manifests)
        alone = team.run(manifests, backward=False)
    for key, rows in alone.rows.items():
        assert rows["o"].allclose(with_backward.rows[key]["o"], atol=1e-6)


@pytest.mark.parametrize("head_groups", [1, 2])
def test_softcaps_and_audits_know_the_window(pool_of_four: Cluster, head_groups: int) -> None:
    with Team(
        pool_of_four,
        3,
        replace(make_shape(), softcap=1.5),
        layers=LAYERS,
        serve_windows=True,
        head_groups=head_groups,
        placement="mixed",
        audit_rate=1.0,
    ) as team:
        team.check(THREE_RANKS["among others"])


def test_a_window_that_is_not_the_sessions_is_refused(pool_of_four: Cluster) -> None:
    with (
        Team(
            pool_of_four, 1, make_shape(), layers=[Layer(window=8)], windows=[9], serve_windows=True
        ) as team,
        pytest.raises(SessionError),
    ):
        team.run(in_halves(1, 40))


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
    layers = [Layer(window=40, sinks=True), Layer(), Layer(window=1000)]
    steps = [
        in_halves(2, 301),
        in_halves(2, 40, 3, 120, 2, 1, 3000 if device == "cuda" else 300, 7),
        in_halves(2, *[1, 2, 3, 1, 5] * 6, 64, *[2, 1] * 8),
    ]
    options = {
        "control_plane": pool_of_four.address,
        "job": f"processes-{device}",
        "n_layers": len(layers),
        "windows": [layer.window or 0 for layer in layers],
        "shape": shape,
        **on_this_host(pool_of_four.folder),
    }
    found = run_ranks(tmp_path, options, layers, steps, devices)
    for manifests, rows in zip(steps, found, strict=True):
        for number, layer in enumerate(layers):
            compare(manifests, rows, number, layer, shape, shape.default_softmax_scale)
