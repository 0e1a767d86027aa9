"""What plans say of themselves, and what is short where there is none."""

from __future__ import annotations

import pytest

from control_plane.planner.bounds import rules_of
from control_plane.planner.explain import verdict
from control_plane.planner.fleet import build_fleet
from control_plane.planner.phase import Outcome
from control_plane.planner.planning import PlanningOptions
from core_attention.ca_task import Phase
from core_attention.plan import PlanVerdict
from tests.service.control_plane.planner.small_plans import (
    PROFILE,
)
from tests.support.planning_cases import SHAPE, in_place

OPTIONS = PlanningOptions(tolerance=0.05)
STOPPED = Outcome(10.0, 1.0, 1.0, 0.0, 0.0, 10.5, 2e9, 2e9, 4, -1, 0, -1)
"""Exactly the tolerance above the target load."""


def above_target_load(share: float) -> Outcome:
    """An outcome whose busiest server is by ``share`` above the target load."""
    busiest = STOPPED.target_load * (1.0 + share)
    return STOPPED._replace(busiest=busiest, excess=busiest - STOPPED.target_load * 1.05)


@pytest.mark.parametrize(
    ("share", "longest", "capacity_rows", "expected"),
    [
        (0.069, 1000, None, PlanVerdict.KEPT),
        (0.071, 1000, None, PlanVerdict.MISSED),
        (0.071, 1000, 5000, PlanVerdict.LIMITED),
        (0.071, 1 << 40, None, PlanVerdict.INDIVISIBLE),
    ],
)
def test_a_miss_is_judged_by_what_is_known_of_why(
    share: float, longest: int, capacity_rows: int | None, expected: PlanVerdict
) -> None:
    servers = in_place(2, profile=PROFILE, capacity_rows=capacity_rows)
    rules = rules_of(SHAPE, Phase.FORWARD, OPTIONS)
    fleet = build_fleet(servers, 2)
    outcomes, ends = [STOPPED, above_target_load(share)], [1, longest]
    assert verdict(servers, fleet, outcomes, ends, OPTIONS, rules, Phase.FORWARD) is expected
