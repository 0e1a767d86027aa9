"""The closed forms against the same steps simulated event by event."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.planner import balanced
from control_plane.planner.planning import PlanningOptions
from core_attention.ca_task import Phase
from core_attention.schedule import Kind
from core_attention.schedule_orders import SCHEDULES
from distca.apps.simulator.disaggregated import (
    Method,
    disaggregated_step,
    nano_batch_times,
    plan_works,
)
from distca.apps.simulator.fleet import build_servers
from distca.apps.simulator.ping_pong import stack_seconds
from distca.apps.simulator.pipeline import schedule_seconds
from distca.apps.simulator.setup import Setup
from distca.apps.simulator.traffic import exchange
from distca.contract.settings import Placement
from tests.unit.simulator.cases import SMALL_MODEL, K, documents, h200, setup
from tests.unit.simulator.event_check import (
    RankTimes,
    pooled_step_seconds_by_events,
    schedule_seconds_by_events,
    stack_seconds_by_events,
)

N_LAYERS = 6


def both_ways(of: Setup, phase: Phase, n_nano_batches: int, pool: int, seed: int) -> list[float]:
    """Seconds of a stack of layers in closed form and by events, for a real plan."""
    method = Method(
        planner=balanced.plan,
        options=PlanningOptions(tolerance=0.1),
        n_nano_batches=n_nano_batches,
    )
    manifest = method.pack(
        documents(of, seed), of.cluster.n_ranks, of.tokens_per_rank, n_nano_batches
    )
    placement = Placement.MIXED if pool else Placement.IN_PLACE
    servers = build_servers(of.cluster, of.rank_profile, placement, pool)
    shape = of.model.attention_shape
    plan = method.planner(manifest, servers, shape, method.options)
    parts = [nano_batch_times(of, work) for work in plan_works(of, plan, phase)]
    events = [
        RankTimes(part.linear_seconds, part.attention_seconds, exchange(plan, shape, phase, k))
        for k, part in enumerate(parts)
    ]
    return [
        stack_seconds(tuple(parts), N_LAYERS),
        stack_seconds_by_events(tuple(events), N_LAYERS, of.cluster),
    ]


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("n_nano_batches", [1, 2])
@pytest.mark.parametrize(
    ("bandwidth", "closed_over_events"),
    [
        # The closed form has a server wait for the last byte of all that its sources send, though
        # what is meant for it may come first (too slow); and it lets the messages of an exchange
        # interleave freely, where by events a piece waits until both of its ports are free (too
        # fast). Both matter only while links are waited for: ever more down the list.
        (400e9, (0.99, 1.06)),
        (40e9, (0.95, 1.14)),
        (4e9, (0.87, 1.12)),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_ping_pong_agrees_with_events(
    phase: Phase,
    n_nano_batches: int,
    bandwidth: float,
    closed_over_events: tuple[float, float],
    seed: int,
) -> None:
    cluster = {"gpu_bandwidth_bytes_per_second": bandwidth}
    of = setup(5, profile=h200(), tokens_per_rank=32 * K, cluster=cluster)
    closed, events = both_ways(of, phase, n_nano_batches, 0, seed)
    low, high = closed_over_events
    assert low <= closed / events <= high


@pytest.mark.parametrize("seed", range(3))
def test_ping_pong_agrees_with_events_on_two_kinds_of_links_and_a_pool(seed: int) -> None:
    cluster = {"gpu_bandwidth_bytes_per_second": 10e9, "gpus_per_host": 2}
    of = setup(4, profile=h200(), tokens_per_rank=32 * K, cluster=cluster)
    closed, events = both_ways(of, Phase.FORWARD, 2, 2, seed)
    assert 0.95 <= closed / events <= 1.14  # as above at 40 GB/s


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
        # By slots a rank that has finished waits for the slowest one, and by events it goes on (too
        # slow); and what is sent in one slot never holds up the next one's messages (too fast).
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
        profile=h200(),
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
