"""What plans say of themselves, and what is short where there is none."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from control_plane.planner.explain import _check_bytes, _why_stopped, reason
from control_plane.planner.fleet import build_fleet
from control_plane.planner.phase import Outcome
from control_plane.planner.planning import PlanningOptions
from core_attention.ca_task import Phase
from core_attention.errors import PlanError
from tests.control_plane.planner.small_plans import LONG, PROFILE, SHORT, manifest_of, plan_of
from tests.control_plane.planning_cases import in_place, pool

OPTIONS = PlanningOptions(tolerance=0.05, max_process_bytes=100)
STOPPED = Outcome(10.0, 1.0, 1.0, 0.0, 0.0, 2e9, 2e9, 4, -1, 0, -1)


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (0.0, "no server was more than 0.05 above the level"),
        (1.0, "had to be exceeded by 0.100"),
        (math.inf, "stopped with servers above the tolerance"),
    ],
)
def test_the_worst_nano_batch_says_why_it_stopped(raised: float, words: str) -> None:
    outcomes = [STOPPED, STOPPED._replace(raised=raised), STOPPED]
    assert words in _why_stopped(outcomes, OPTIONS)


def test_a_reason_names_the_busiest_server_and_what_moves() -> None:
    plan = plan_of(manifest_of([[SHORT], [LONG]]), in_place(2, profile=PROFILE), tolerance=1e9)
    assert plan.forward_forecast is not None
    servers = in_place(2, profile=PROFILE)

    def said(*outcomes: Outcome) -> str:
        assert plan.forward_forecast is not None
        fleet = build_fleet(servers, 2)
        return reason(servers, fleet, plan.forward_forecast, outcomes, OPTIONS, Phase.FORWARD)

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
    with pytest.raises(PlanError, match=r"rank 0 would send 101 bytes .* 1 bytes short"):
        bytes_checked([[0, 60], [0, 0]], [[0, 0], [41, 0]])
    with pytest.raises(PlanError, match="rank 0 would receive 110 bytes"):
        bytes_checked([[0, 0], [50, 0]], [[0, 60], [0, 0]])
    with pytest.raises(PlanError, match="pool-0 would receive 120 bytes"):
        bytes_checked([[0, 60], [0, 60]], [[0, 0], [0, 0]])
