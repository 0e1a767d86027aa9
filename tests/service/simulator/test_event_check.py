"""The closed forms against the same steps simulated event by event."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.planner import balanced
from control_plane.planner.planning import PlanningOptions
from core_attention.schedule import Kind
from core_attention.schedule_orders import SCHEDULES
from distca.apps.simulator.disaggregated import Method, disaggregated_step
from distca.apps.simulator.pipeline import schedule_seconds
from tests.support.planning_cases import PROFILE
from tests.unit.simulator.cases import SMALL_MODEL, K, documents, setup
from tests.unit.simulator.event_check import (
    pooled_step_seconds_by_events,
    schedule_seconds_by_events,
)


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(SCHEDULES)), st.integers(1, 5), st.integers(1, 2), st.integers(0, 1000)
)
def test_pipelines_agree_with_events(name: str, n_ranks: int, rounds: int, seed: int) -> None:
    schedule = SCHEDULES[name](n_ranks, rounds * n_ranks)
    drawn = np.random.default_rng(seed).uniform(0.1, 3, (len(Kind), rounds * n_ranks, 2))
    seconds = dict(zip(Kind, drawn, strict=True))
    closed = schedule_seconds(schedule, seconds)
    events = schedule_seconds_by_events(schedule, seconds)
    assert closed == pytest.approx(events)  # the same longest path: only rounding differs


@pytest.mark.parametrize(
    ("bandwidth", "closed_over_events"),
    [
        # By slots a rank that has finished waits for the slowest one, and by events it goes on; and
        # a server waits for the last byte of all that its sources send (too slow). What is sent in
        # one slot never holds up the next one's messages, which interleave freely (too fast).
        (400e9, (0.95, 1.05)),
        # Messages take longer than what they could hide behind.
        (40e9, (0.80, 1.06)),
    ],
)
@pytest.mark.parametrize("idle_aware", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "same-phase", "zero-bubble"])
@pytest.mark.parametrize("n_stages", [2, 3])
def test_pooled_pipelines_agree_with_events(
    n_stages: int,
    name: str,
    idle_aware: bool,
    bandwidth: float,
    closed_over_events: tuple[float, float],
) -> None:
    of = setup(
        n_stages,
        n_stages=n_stages,
        n_microbatches=n_stages,
        profile=PROFILE,
        model=replace(SMALL_MODEL, n_layers=6 * n_stages),
        tokens_per_rank=32 * K,
        cluster={"gpu_bandwidth_bytes_per_second": bandwidth},
    )
    method = Method(
        planner=balanced.plan,
        options=PlanningOptions(),
        schedule=SCHEDULES[name],
        idle_aware=idle_aware,
    )
    lengths = documents(of, 1)
    closed = disaggregated_step(of, lengths, method).seconds
    low, high = closed_over_events
    assert low <= closed / pooled_step_seconds_by_events(of, lengths, method) <= high
