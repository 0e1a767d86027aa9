"""What plans say of themselves, and what is short where there is none."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from control_plane.planner.bounds import rules_of
from control_plane.planner.explain import (
    _check_bytes,
    verdict,
)
from control_plane.planner.phase import Outcome
from control_plane.planner.planning import PlanningOptions
from core_attention.ca_task import Phase
from core_attention.errors import PlanError
from core_attention.plan import PlanVerdict
from tests.service.control_plane.planner.small_plans import (
    PROFILE,
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


@pytest.mark.parametrize(
    ("requests", "replies", "over"),
    [
        ([[0, 100], [0, 0]], [[0, 100], [0, 0]], ""),
        ([[0, 60], [0, 0]], [[0, 0], [41, 0]], "rank 0 .* 101"),
        ([[0, 0], [50, 0]], [[0, 60], [0, 0]], "rank 0 .* 110"),
        ([[0, 60], [0, 60]], [[0, 0], [0, 0]], "pool-0 .* 120"),
    ],
)
def test_a_rank_and_its_in_place_server_are_one_process(
    requests: list[list[int]], replies: list[list[int]], over: str
) -> None:
    """By rank, what it sends each server; and what comes back."""
    servers, both = [*in_place(1), *pool(1)], (np.array(requests), np.array(replies))
    with pytest.raises(PlanError, match=over) if over else nullcontext():
        _check_bytes(servers, *both, 100, Phase.FORWARD)
