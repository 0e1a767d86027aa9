"""Which of two plans is kept, and when planning again cannot help."""

from __future__ import annotations

import math
from typing import Any

import pytest

from control_plane.planner.phase import (
    FINEST_RUNG,
    LEAST_RELIEF,
    MOST_MISSED,
    SMALL_FLEET_DRIFT,
    Outcome,
    _better,
    _may_search_again,
    _rungs,
    _seen_from,
    _undercuts,
)
from tests.service.control_plane.planner.compiled_calls import callable_from_python

LEVEL = 10.0
PLAN = Outcome(
    target_load=LEVEL,
    scale=1.0,
    work_ratio=1.0,
    raised=0.0,
    excess=0.0,
    busiest=LEVEL,
    spent_bytes=100.0,
    spent_cost=100.0,
    n_chunks=3,
    stuck_segment=-1,
    stuck_end=0,
    stuck_server=-1,
)
NEXT_TO_NOTHING, MUCH = 0.5e-3 * LEVEL, 2e-3 * LEVEL


@pytest.mark.parametrize(
    ("changes", "is_better"),
    [
        ({"spent_cost": 99.0}, True),
        ({"spent_cost": 100.0}, False),
        ({"spent_cost": 1.0, "raised": MUCH}, False),
        ({"spent_cost": 99.0, "raised": NEXT_TO_NOTHING}, True),
        ({"spent_cost": 1.0, "excess": SMALL_FLEET_DRIFT * LEVEL + MUCH}, False),
        ({"spent_cost": 99.0, "excess": SMALL_FLEET_DRIFT * LEVEL}, True),
    ],
)
def test_a_plan_is_better_if_it_is_cheaper_and_its_servers_no_busier(
    changes: dict[str, Any], is_better: bool
) -> None:
    assert callable_from_python(_better)(PLAN._replace(**changes), PLAN) is is_better


def test_a_less_busy_server_is_worth_more_bytes() -> None:
    better = callable_from_python(_better)
    assert better(PLAN._replace(spent_cost=1000.0), PLAN._replace(raised=MUCH))
    assert not better(PLAN._replace(spent_cost=1000.0), PLAN._replace(raised=NEXT_TO_NOTHING))
    assert better(PLAN._replace(raised=1.0), PLAN._replace(raised=math.inf))


@pytest.mark.parametrize(
    ("changes", "does"),
    [
        ({"spent_cost": 99.0}, True),
        ({"spent_cost": 101.0, "busiest": 0.9 * LEVEL}, False),
        ({}, False),
        ({"busiest": 0.9 * LEVEL}, True),
        ({"spent_cost": 99.0, "raised": NEXT_TO_NOTHING, "busiest": 1.1 * LEVEL}, True),
        ({"spent_cost": 99.0, "raised": MUCH, "busiest": 1.001 * LEVEL}, False),
        ({"spent_cost": 99.0, "raised": MUCH}, True),
        ({"spent_cost": 99.0, "raised": 1.1 * MOST_MISSED * LEVEL}, False),
        ({"spent_cost": 99.0, "stuck_segment": 0}, False),
    ],
)
def test_a_plan_undercuts_another_one_if_it_is_cheaper_and_ends_no_later(
    changes: dict[str, Any], does: bool
) -> None:
    assert callable_from_python(_undercuts)(PLAN._replace(**changes), PLAN) is does


@pytest.mark.parametrize(
    ("tolerance", "others"),
    [
        (0.0, [FINEST_RUNG]),
        (0.005, [FINEST_RUNG, 0.0]),
        (0.01, [0.02, 0.0]),
        (0.02, [0.01, 0.0]),
        (0.03, [0.02, 0.01, 0.0]),
        (0.16, [0.08, 0.04, 0.02, 0.01, 0.0]),
    ],
)
def test_tolerances_share_their_rungs(tolerance: float, others: list[float]) -> None:
    rungs = callable_from_python(_rungs)
    assert rungs(tolerance, True).tolist() == [tolerance, *others]
    assert rungs(tolerance, False).tolist() == [tolerance]


def test_a_tighter_plan_leaves_what_the_asked_tolerance_allows() -> None:
    seen = callable_from_python(_seen_from)
    busiest = 1.03 * LEVEL
    tight = PLAN._replace(busiest=busiest, excess=busiest - 1.01 * LEVEL, raised=0.02 * LEVEL)
    plan = seen(tight, 0.01, 0.02)
    assert plan.raised == pytest.approx(0.01 * LEVEL)
    assert plan.excess == pytest.approx(busiest - 1.02 * LEVEL)
    assert seen(tight, 0.01, 0.04).raised == 0.0
    assert seen(tight, 0.01, 0.04).excess == pytest.approx(busiest - 1.04 * LEVEL)
    assert seen(tight, 0.01, 0.0).raised == pytest.approx(0.03 * LEVEL)
    assert math.isinf(seen(tight._replace(raised=math.inf), 0.01, 0.04).raised)


def test_a_search_that_gave_up_is_made_again_only_at_a_higher_target_load() -> None:
    again = callable_from_python(_may_search_again)
    gave_up = PLAN._replace(raised=math.inf)
    assert not again(gave_up, PLAN)
    assert not again(gave_up, PLAN._replace(scale=1.0 + 0.9 * LEAST_RELIEF))
    assert again(gave_up, PLAN._replace(scale=1.0 + 1.1 * LEAST_RELIEF))
    assert again(PLAN._replace(raised=MUCH), PLAN)
