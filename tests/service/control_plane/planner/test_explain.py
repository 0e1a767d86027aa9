"""What plans say of themselves, and what is short where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from control_plane.planner.bounds import rules_of
from control_plane.planner.explain import (
    _check_bytes,
    _why_stopped,
    over_target_load,
    reason,
    verdict,
)
from control_plane.planner.fleet import build_fleet
from control_plane.planner.phase import Outcome
from control_plane.planner.planning import PlanningOptions
from core_attention.ca_task import Phase
from core_attention.errors import PlanError
from core_attention.plan import PlanVerdict
from tests.service.control_plane.planner.small_plans import (
    LONG,
    PROFILE,
    SHORT,
    manifest_of,
    plan_of,
)
from tests.support.planning_cases import SHAPE, in_place, pool

OPTIONS = PlanningOptions(tolerance=0.05, max_process_bytes=100)
STOPPED = Outcome(10.0, 1.0, 1.0, 0.0, 0.0, 10.5, 2e9, 2e9, 4, -1, 0, -1)
"""Exactly the tolerance above the target load."""


def above_target_load(share: float) -> Outcome:
    """An outcome whose busiest server is by ``share`` above the target load."""
    busiest = STOPPED.target_load * (1.0 + share)
    return STOPPED._replace(busiest=busiest, excess=busiest - STOPPED.target_load * 1.05)


@pytest.mark.parametrize(
    ("share", "judged", "words"),
    [
        (0.05, PlanVerdict.KEPT, "no server is more than 0.05 above the target load"),
        (
            0.06,
            PlanVerdict.KEPT,
            "is 0.060 above the target load, the tolerance is 0.05; plans may be",
        ),
        (
            0.5,
            PlanVerdict.MISSED,
            "is 0.500 above the target load, the tolerance is missed, 0.05: no",
        ),
        (0.5, PlanVerdict.LIMITED, "within the memory and byte limits that are set"),
        (0.5, PlanVerdict.INDIVISIBLE, "no plan can keep it"),
    ],
)
def test_the_worst_nano_batch_says_why_it_stopped(
    share: float, judged: PlanVerdict, words: str
) -> None:
    outcomes = [STOPPED, above_target_load(share), STOPPED]
    assert over_target_load(outcomes[1], OPTIONS.tolerance) == pytest.approx(share)
    assert words in _why_stopped(outcomes, OPTIONS, judged)


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
    options = replace(OPTIONS, max_process_bytes=None)
    outcomes, ends = [STOPPED, above_target_load(share)], [1, longest]
    assert verdict(servers, outcomes, ends, options, rules, Phase.FORWARD) is expected


def test_a_reason_names_the_busiest_server_and_what_moves() -> None:
    plan = plan_of(manifest_of([[SHORT], [LONG]]), in_place(2, profile=PROFILE), tolerance=1e9)
    assert plan.forward_forecast is not None
    servers = in_place(2, profile=PROFILE)

    def said(*outcomes: Outcome) -> str:
        assert plan.forward_forecast is not None
        fleet = build_fleet(servers, 2)
        return reason(
            servers,
            fleet,
            plan.forward_forecast,
            outcomes,
            OPTIONS,
            Phase.FORWARD,
            PlanVerdict.KEPT,
        )

    assert "bounded by server rank-1" in said(STOPPED)
    assert "8 pieces leave their home with 4.000 GB" in said(STOPPED, STOPPED)
    assert "nothing moves" in said(STOPPED._replace(n_chunks=0))
    assert "its rank's own" not in said(STOPPED)
    servers[0] = replace(servers[0], base_seconds=(1.0, 2.0))
    assert "server rank-0 with 1000." in said(STOPPED)
    assert ", 1000.000 ms of them its rank's own" in said(STOPPED)


def bytes_checked(requests: Any, replies: Any) -> None:
    servers = [*in_place(1), *pool(1)]
    _check_bytes(servers, np.array(requests), np.array(replies), 100, Phase.FORWARD)


def test_a_rank_and_its_in_place_server_are_one_process() -> None:
    """By rank, what it sends each server; and what comes back."""
    bytes_checked([[0, 100], [0, 0]], [[0, 100], [0, 0]])
    with pytest.raises(PlanError, match="rank 0 would send 101 bytes"):
        bytes_checked([[0, 60], [0, 0]], [[0, 0], [41, 0]])
    with pytest.raises(PlanError, match="rank 0 would receive 110 bytes"):
        bytes_checked([[0, 0], [50, 0]], [[0, 60], [0, 0]])
    with pytest.raises(PlanError, match="pool-0 would receive 120 bytes"):
        bytes_checked([[0, 60], [0, 60]], [[0, 0], [0, 0]])
