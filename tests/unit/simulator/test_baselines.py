"""The baselines: what bounds them and how they compare."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from core_attention.arrays import Int64Array
from core_attention.ca_task import Phase
from distca.apps.simulator.baselines import (
    balanced_seconds,
    best_context_parallel,
    context_parallel,
    plain_packing,
    repacked,
)
from distca.apps.simulator.context_parallel import gather_seconds, sharded_seconds
from distca.apps.simulator.profile import document_seconds
from distca.apps.simulator.setup import Setup
from tests.support.planning_cases import PROFILE
from tests.unit.simulator.cases import K, documents, flat_profile, setup


@pytest.mark.parametrize(
    ("n_ranks", "method", "lengths"),
    [
        (4, plain_packing, np.full(16, 4 * K)),
        # A document that fits nowhere is cut evenly.
        (3, repacked, np.full(4, 12 * K)),
    ],
)
def test_equal_documents_make_packing_perfect(
    n_ranks: int, method: Callable[[Setup, Int64Array], float], lengths: Int64Array
) -> None:
    of = setup(n_ranks)
    assert method(of, lengths) == pytest.approx(balanced_seconds(of, lengths))


def test_one_long_document_makes_its_rank_the_straggler() -> None:
    of = setup(4)
    lengths = np.array([16 * K] + [1 * K] * 48)
    attention = sum(
        document_seconds(of.rank_profile, np.array([16 * K]), phase)[0] for phase in Phase
    )
    linear = 16 * K * sum(of.linear_seconds_per_token(phase) for phase in Phase)
    expected = (linear + attention) * of.model.n_layers
    assert plain_packing(of, lengths) == pytest.approx(expected)
    assert repacked(of, lengths) == pytest.approx(expected)


STAGES_AND_MICROBATCHES = [(1, 1), (1, 3), (2, 2), (2, 4)]


def uneven(n_stages: int, n_microbatches: int, seed: int) -> tuple[Setup, Int64Array]:
    """Pipelines, and documents of any length up to a rank's tokens."""
    draw = np.random.default_rng(seed)
    n_pipelines = int(draw.choice([2, 3, 4, 6]))
    of = setup(
        n_pipelines * n_stages,
        n_stages=n_stages,
        n_microbatches=n_microbatches,
        profile=PROFILE,
        tokens_per_rank=64 * K,
    )
    drawn = np.cumsum(draw.integers(1, 64, size=of.step_tokens // K)) * K
    ends = [*drawn[drawn < of.step_tokens], of.step_tokens]
    return of, np.diff(ends, prepend=0)


@pytest.mark.parametrize(("n_stages", "n_microbatches"), STAGES_AND_MICROBATCHES)
def test_more_freedom_is_never_slower(n_stages: int, n_microbatches: int) -> None:
    """Re-packing, context parallelism besides, and perfect balance."""
    for seed in range(40):
        of, lengths = uneven(n_stages, n_microbatches, seed)
        seconds = [
            plain_packing(of, lengths),
            repacked(of, lengths),
            best_context_parallel(of, lengths),
        ]
        if n_stages == 1:  # else bubbles depend on the order of microbatches
            seconds.append(balanced_seconds(of, lengths) * (1 - 1e-9))  # rounding
        assert seconds == sorted(seconds, reverse=True)


def test_context_parallelism_divides_attention_and_pays_for_the_gather() -> None:
    of = setup(4)
    lengths = np.array([16 * K, 1 * K])
    for phase in Phase:
        whole = document_seconds(flat_profile(), lengths, phase)
        shared = sharded_seconds(flat_profile(), lengths, 4, phase)
        assert shared == pytest.approx(whole / 4)
    shape = of.model.attention_shape
    seconds = gather_seconds(np.array([64 * K]), shape, 4, of.cluster)
    moved = 64 * K * shape.kv_row_bytes * 3 / 4
    latency = 3 * of.cluster.message_latency_seconds
    assert seconds[0] == pytest.approx(moved / of.cluster.gpu_bandwidth_bytes_per_second + latency)


def test_short_chunks_run_at_the_slower_rate_of_the_profile() -> None:
    profile = PROFILE
    length = np.array([4 * K])
    whole = document_seconds(profile, length, Phase.BACKWARD)
    shared = sharded_seconds(profile, length, 8, Phase.BACKWARD)
    assert shared[0] > whole[0] / 8


def test_the_sweep_takes_the_best_group() -> None:
    of = setup(8, profile=PROFILE, tokens_per_rank=64 * K)
    lengths = documents(of)
    every = [context_parallel(of, lengths, size) for size in (1, 2, 4, 8)]
    assert best_context_parallel(of, lengths) == min(every)


@pytest.mark.parametrize("seconds", [plain_packing, repacked, balanced_seconds])
def test_gradients_add_the_same_to_every_method(
    seconds: Callable[[Setup, Int64Array], float],
) -> None:
    lengths = np.full(16, 4 * K)
    with_gradients = seconds(setup(4, gradient_sync_seconds=2.0), lengths)
    assert with_gradients - seconds(setup(4), lengths) == pytest.approx(2.0)
