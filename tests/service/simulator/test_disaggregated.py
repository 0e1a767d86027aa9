"""Step times with disaggregation."""

from __future__ import annotations

import numpy as np
import pytest

from control_plane.planner import balanced
from control_plane.planner.planning import PlanningOptions
from distca.apps.simulator.baselines import balanced_seconds, plain_packing
from distca.apps.simulator.disaggregated import Method, disaggregated_step, slot_manifest
from distca.apps.simulator.packing import pack_in_order
from distca.contract.settings import Placement
from tests.support.planning_cases import PROFILE
from tests.unit.simulator.cases import K, documents, setup

METHOD = Method(planner=balanced.plan, options=PlanningOptions(tolerance=0.05))
ENDLESS = {
    "gpu_bandwidth_bytes_per_second": 1e18,
    "host_bandwidth_bytes_per_second": 1e18,
    "message_latency_seconds": 0.0,
}


def test_even_documents_stay_and_take_the_balanced_time() -> None:
    of = setup(4)
    lengths = np.full(16, 4 * K)
    step = disaggregated_step(of, lengths, METHOD)
    assert step.seconds == pytest.approx(balanced_seconds(of, lengths))
    assert (step.moved_bytes, step.exposed_seconds) == (0, 0)
    assert step.imbalance == pytest.approx(1)


def test_with_endless_links_a_step_is_within_its_imbalance_of_balance() -> None:
    of = setup(8, profile=PROFILE, tokens_per_rank=128 * K, cluster=ENDLESS)
    for seed in range(3):
        lengths = documents(of, seed)
        step = disaggregated_step(of, lengths, METHOD)
        balanced = balanced_seconds(of, lengths)
        assert step.exposed_seconds == pytest.approx(0, abs=1e-9 * balanced)
        # Cut documents run a little slower than whole ones, up to twice below 1K tokens.
        assert step.seconds <= balanced * step.imbalance * 1.1
        assert step.seconds < plain_packing(of, lengths)


def test_slower_links_never_make_a_step_faster() -> None:
    lengths = documents(setup(8, tokens_per_rank=128 * K))
    seconds = [
        disaggregated_step(
            setup(
                8,
                profile=PROFILE,
                tokens_per_rank=128 * K,
                cluster={"gpu_bandwidth_bytes_per_second": bandwidth},
            ),
            lengths,
            METHOD,
        ).seconds
        for bandwidth in (400e9, 100e9, 25e9, 5e9)
    ]
    assert seconds == sorted(seconds)


def test_a_tick_holds_its_microbatches_on_their_stages() -> None:
    manifests = [pack_in_order(np.array([6, 10, i + 1, 15 - i]), 2, 16, 2) for i in range(3)]
    merged = slot_manifest(manifests, [(0, 2), (2, 0)], 3, 2)
    assert merged.n_ranks == 6
    for nano_batch in range(2):
        assert merged.tokens_per_rank(nano_batch).tolist() == [8, 8, 0, 0, 8, 8]
    expected = sorted([*manifests[0].document_length, *manifests[2].document_length])
    assert sorted(merged.document_length) == expected


def test_a_pool_moves_everything() -> None:
    of = setup(4, profile=PROFILE)
    lengths = documents(of)
    pool = disaggregated_step(of, lengths, METHOD, Placement.POOL, 4)
    in_place = disaggregated_step(of, lengths, METHOD)
    assert pool.moved_bytes > in_place.moved_bytes
    shape = of.model.attention_shape
    assert pool.moved_bytes >= of.step_tokens * (shape.q_row_bytes + shape.o_row_bytes) * 2


def test_without_ping_pong_communication_is_exposed() -> None:
    of = setup(8, profile=PROFILE, tokens_per_rank=128 * K)
    lengths = documents(of)
    single = Method(planner=balanced.plan, options=METHOD.options, n_nano_batches=1)
    assert (
        disaggregated_step(of, lengths, single).exposed_seconds
        > disaggregated_step(of, lengths, METHOD).exposed_seconds
    )
