"""Pipeline schedules with disaggregation: what they take, what wins, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from control_plane.planner import balanced
from control_plane.planner.planning import PlanningOptions
from core_attention.ca_task import Phase
from core_attention.plan import level_seconds
from core_attention.schedule_orders import SCHEDULES
from distca.apps.simulator.baselines import balanced_seconds
from distca.apps.simulator.disaggregated import (
    DisaggregatedStep,
    Method,
    disaggregated_step,
)
from distca.apps.simulator.schedules import (
    EVEN,
    IDLE_AWARE,
    ScheduleComparison,
    ScheduleTimes,
    compare_schedules,
    fitting_orders,
    judge_schedules,
)
from distca.apps.simulator.setup import Setup
from distca.apps.simulator.verdict import Remedy, Worth
from tests.support.planning_cases import PROFILE
from tests.unit.simulator.cases import SMALL_MODEL, K, documents, setup

ENDLESS = {
    "gpu_bandwidth_bytes_per_second": 1e18,
    "host_bandwidth_bytes_per_second": 1e18,
    "message_latency_seconds": 0.0,
}
DEEP = replace(SMALL_MODEL, n_layers=96)
"""So many layers that a slot's first linear part, before which nobody can serve, hardly counts."""
METHOD = Method(planner=balanced.plan, options=PlanningOptions())


def with_ratio(n_stages: int, n_microbatches: int, ratio: float) -> tuple[Setup, float, float]:
    """A pipeline whose microbatches' attention takes ``ratio`` times as long as their linear part,
    and the seconds of both on one stage."""
    tokens = 256 * K
    of = setup(
        n_stages,
        n_stages=n_stages,
        n_microbatches=n_microbatches,
        model=DEEP,
        tokens_per_rank=tokens,
        cluster=ENDLESS,
    )

    def parts(of: Setup) -> tuple[float, float]:
        per_token = sum(of.linear_seconds_per_token(phase) for phase in Phase)
        linear = per_token * tokens * of.layers_per_stage
        slots = n_microbatches + n_stages - 1
        return linear, balanced_seconds(of, equal_documents(of)) / slots - linear

    linear, attention = parts(of)
    faster = of.cluster.linear_flops_per_second * linear * ratio / attention
    of = replace(of, cluster=replace(of.cluster, linear_flops_per_second=faster))
    return (of, *parts(of))


def equal_documents(of: Setup) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.full(of.step_tokens // (8 * K), 8 * K)


@pytest.mark.parametrize(
    ("n_stages", "n_microbatches", "ratio", "even", "idle_aware"),
    [
        # shared/PIPELINE.md: gains over a perfectly balanced 1F1B, transport free.
        (4, 4, 1.0, 1.27, 1.56),
        (4, 4, 0.35, 1.125, 1.28),
        (4, 8, 1.0, 1.16, 1.29),
        (2, 4, 1.0, 1.11, 1.25),
    ],
)
@pytest.mark.parametrize("name", ["same-phase", "1f1b"])
def test_real_plans_gain_what_the_formula_says(
    name: str, n_stages: int, n_microbatches: int, ratio: float, even: float, idle_aware: float
) -> None:
    of, linear, attention = with_ratio(n_stages, n_microbatches, ratio)
    n_ticks = n_microbatches + n_stages - 1
    active = [min(k + 1, n_stages, n_microbatches, n_ticks - k) for k in range(n_ticks)]
    balanced_step = n_ticks * (linear + attention)
    formula = {
        False: sum(linear + n * attention / n_stages for n in active),
        True: sum(max(linear, n * (linear + attention) / n_stages) for n in active),
    }
    assert balanced_step / formula[False] == pytest.approx(even, abs=0.005)
    assert balanced_step / formula[True] == pytest.approx(idle_aware, abs=0.005)
    for aware, seconds in formula.items():
        method = replace(
            METHOD,
            options=PlanningOptions(tolerance=0.005),
            schedule=SCHEDULES[name],
            idle_aware=aware,
        )
        step = disaggregated_step(of, equal_documents(of), method)
        # The tolerance, and the first linear part of each slot.
        assert seconds * 0.995 <= step.seconds <= seconds * 1.02
        expected_idle = 1 - n_microbatches * (linear + attention) / step.seconds
        assert step.idle_share == pytest.approx(expected_idle, abs=0.01)
        assert step.in_flight == SCHEDULES[name](n_stages, n_microbatches).peak_in_flight


def test_backwards_in_two_parts_leave_less_to_idle() -> None:
    of, _, _ = with_ratio(4, 4, 1.0)
    lengths = equal_documents(of)
    seconds = {
        name: disaggregated_step(
            of, lengths, replace(METHOD, schedule=SCHEDULES[name], idle_aware=True)
        ).seconds
        # In 1f1b-split, whole backwards of the first stage run beside the others' first parts.
        for name in ("1f1b", "1f1b-split", "zero-bubble")
    }
    alone = balanced_seconds(of, lengths, SCHEDULES["zero-bubble"])
    assert seconds["zero-bubble"] < 0.95 * seconds["1f1b"] < alone
    assert 0.98 * seconds["zero-bubble"] < seconds["1f1b-split"] < 0.96 * seconds["1f1b"]


@pytest.mark.parametrize(
    ("base", "work", "level"),
    [
        ([0.0, 0.0], 4.0, 2.0),
        ([3.0, 1.0], 8.0, 6.0),
        ([3.0, 1.0], 1.0, 3.0),
        ([5.0], 2.0, 7.0),
        ([2.0, 2.0, 0.0], 1.0, 2.0),
    ],
)
def test_the_level_of_base_and_work(base: list[float], work: float, level: float) -> None:
    assert level_seconds(np.array(base), np.array(work)) == pytest.approx(level)


def times(name: str, in_flight: float, alone: float, pooled: float, waits: float) -> ScheduleTimes:
    step = DisaggregatedStep(pooled, waits, 1.0, 0, 0.1, in_flight)
    slower = replace(step, seconds=1.1 * pooled)
    return ScheduleTimes(
        name=name,
        in_flight=in_flight,
        plain_seconds=1.3 * alone,
        repacked_seconds=alone,
        balanced_seconds=0.9 * alone,
        pooled={EVEN: slower, IDLE_AWARE: step},
    )


def judged(*rows: ScheduleTimes, limit: float = 4) -> tuple[Worth, str]:
    verdict = judge_schedules(
        ScheduleComparison(
            n_gpus=8,
            times=rows,
            balanced_1f1b_seconds=9.0,
            plain_1f1b_seconds=13.0,
            in_flight_limit=limit,
        ),
        tuple(Remedy),
    )
    return verdict.kind, verdict.text


PLAIN = times("1f1b", 4, 10.0, 8.0, 0.1)
RIVAL = times("zero-bubble", 4, 8.05, 9.0, 0.1)


@pytest.mark.parametrize(
    ("rows", "worth", "waits"),
    [
        ([PLAIN, times("same-phase", 7, 11.0, 7.0, 0.1)], Worth.GAIN, False),
        # A rival that fits counts, and one that does not is left out.
        ([PLAIN, RIVAL], Worth.NOTHING_TO_GAIN, False),
        ([PLAIN, replace(RIVAL, in_flight=5)], Worth.GAIN, False),
        ([times("1f1b", 4, 10.0, 8.0, 1.0)], Worth.LINKS_TOO_SLOW, True),
        # Links are why nothing is gained; or nothing would be gained without waiting for them.
        ([times("1f1b", 4, 10.0, 10.1, 1.57)], Worth.LINKS_TOO_SLOW, True),
        ([times("1f1b", 4, 10.0, 10.3, 0.6)], Worth.LINKS_TOO_SLOW, True),
        ([times("1f1b", 4, 10.0, 11.5, 1.6)], Worth.NOTHING_TO_GAIN, False),
    ],
)
def test_schedules_are_judged_by_what_fits_and_what_waits_for_links(
    rows: list[ScheduleTimes], worth: Worth, waits: bool
) -> None:
    kind, text = judged(*rows)
    assert kind is worth
    assert ("links" in text) is waits


def test_the_verdict_names_what_to_run_and_what_it_is_measured_against() -> None:
    _, text = judged(PLAIN, times("same-phase", 7, 11.0, 7.0, 0.1))
    for words in ("Run schedule 1f1b with idle-aware plans: 1.25x", "1.62x", "room for 7"):
        assert words in text
    assert judged(PLAIN, RIVAL)[1].endswith("Run zero-bubble, re-packed.")
    assert "1f1b keeps the fewest, 4" in judged(PLAIN, limit=2)[1]


def test_schedules_are_compared_on_the_same_documents() -> None:
    """Of a document of a whole microbatch, nano-batches leave two halves, for every method."""
    of = setup(2, n_stages=2, n_microbatches=2, profile=PROFILE, tokens_per_rank=32 * K)
    found = compare_schedules(of, [documents(of)], METHOD, {"1f1b": SCHEDULES["1f1b"]})
    (row,) = found.times
    whole = balanced_seconds(of, np.full(2, 32 * K))
    halves = balanced_seconds(of, np.full(4, 16 * K))
    cut = compare_schedules(of, [np.full(2, 32 * K)], METHOD, {"1f1b": SCHEDULES["1f1b"]})
    assert cut.balanced_1f1b_seconds == pytest.approx(halves) != pytest.approx(whole)
    assert row.balanced_seconds == found.balanced_1f1b_seconds
    assert row.plain_seconds == found.plain_1f1b_seconds
    assert found.in_flight_limit == row.in_flight == 2
    assert set(row.pooled) == {EVEN, IDLE_AWARE}


def test_schedules_that_cannot_run_are_left_out_with_their_reason() -> None:
    of = setup(4, n_stages=4, n_microbatches=6)
    orders, left_out = fitting_orders(of)
    assert sorted(orders) == ["1f1b", "1f1b-split", "same-phase", "zero-bubble"]
    assert left_out == [
        "schedule interleaved: 6 microbatches over 4 ranks; they must be a multiple of the ranks"
    ]
    of = setup(4, n_stages=4, n_microbatches=8)  # a layer a stage, none to divide
    assert "4 layers cannot be divided over the 8 stages" in fitting_orders(of)[1][0]
