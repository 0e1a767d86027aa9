"""The paper's scheduler does what the paper says, no more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import greedy
from control_plane.planner.planning import PlanningOptions
from core_attention.errors import PlanError
from tests.support.planning_cases import (
    SHAPE,
    assert_equal,
    in_place,
    pool,
    stream_manifest,
)


def test_nothing_moves_when_all_is_level() -> None:
    manifest = stream_manifest([8192] * 4, 4)
    plan = greedy.plan(manifest, in_place(4), SHAPE, PlanningOptions())
    assert len(plan.forward) == 4
    assert plan.forward_forecast is not None
    assert plan.forward_forecast.bytes_in.sum() == 0


def test_a_giant_document_is_shared_in_shards_of_128() -> None:
    manifest = stream_manifest([65536] + [256] * 768, 4)
    plan = greedy.plan(manifest, in_place(4), SHAPE, PlanningOptions(tolerance=0.05))
    assert plan.forward_forecast is not None
    assert plan.forward_forecast.home_imbalance > 3
    # A receiver is filled to the mean within eps; the donor keeps what its rounding left.
    assert plan.forward_forecast.predicted_imbalance < 1.15
    of_giant = plan.forward.document == np.argmax(manifest.document_length)
    assert (plan.forward.q_begin[of_giant] % 128 == 0).all()
    assert len(np.unique(plan.forward.server[of_giant])) == 4
    assert plan.backward is plan.forward


def test_a_pool_starts_level() -> None:
    manifest = stream_manifest([4096] * 12, 2)
    plan = greedy.plan(manifest, pool(3), SHAPE, PlanningOptions())
    assert plan.forward_forecast is not None
    assert plan.forward_forecast.predicted_imbalance == pytest.approx(1.0)


def test_only_receiving_servers_receive() -> None:
    manifest = stream_manifest([65536] + [256] * 768, 4)
    servers = in_place(2) + in_place(4, receives=False)[2:]
    plan = greedy.plan(manifest, servers, SHAPE, PlanningOptions())
    assert plan.forward_forecast is not None
    assert (plan.forward_forecast.bytes_in[0, 2:] == 0).all()


def test_work_without_a_server_is_an_error() -> None:
    manifest = stream_manifest([100, 100], 2)
    with pytest.raises(PlanError):
        greedy.plan(manifest, in_place(1, receives=False), SHAPE, PlanningOptions())


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 30_000), min_size=1, max_size=30),
    n_ranks=st.integers(1, 6),
    n_pool=st.integers(0, 4),
    has_in_place=st.booleans(),
    span=st.booleans(),
)
def test_every_plan_is_valid_and_repeatable(
    lengths: list[int], n_ranks: int, n_pool: int, has_in_place: bool, span: bool
) -> None:
    n_ranks = min(n_ranks, sum(lengths))
    manifest = stream_manifest(lengths, n_ranks, span=span)
    servers = (in_place(n_ranks) if has_in_place or not n_pool else []) + pool(n_pool)
    first = greedy.plan(manifest, servers, SHAPE, PlanningOptions(tolerance=0.05))
    second = greedy.plan(manifest, servers, SHAPE, PlanningOptions(tolerance=0.05))
    assert_equal(first, second)
