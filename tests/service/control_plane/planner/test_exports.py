"""Who gives, who takes, and what happens when room runs out."""

from __future__ import annotations

import numpy as np
import pytest

from control_plane.planner.planning import PlanningServer
from tests.service.control_plane.planner.small_plans import (
    LONG,
    PROFILE,
    SHORT,
    manifest_of,
    plan_of,
    rows_moved,
)
from tests.support.planning_cases import in_place, pool


def test_the_servers_with_most_room_take_all_that_is_above_the_cap() -> None:
    plan = plan_of(
        manifest_of([[LONG], [LONG * 9 // 10], [SHORT], [SHORT]]), in_place(4, profile=PROFILE)
    )
    moved = rows_moved(plan)
    assert {server for _, server in moved} == {2, 3}
    assert {home for home, _ in moved} == {0, 1}
    assert plan.forward_forecast is not None
    assert plan.forward_forecast.predicted_imbalance <= 1.05 + 1e-3


def test_nobody_within_the_tolerance_gives_or_takes() -> None:
    lengths = [[LONG], [LONG * 101 // 100], [LONG * 99 // 100]]
    assert not rows_moved(plan_of(manifest_of(lengths), in_place(3, profile=PROFILE)))


def test_the_cap_rises_where_pieces_cannot_be_small_enough() -> None:
    """Each document is shorter than cuts are apart."""
    plan = plan_of(manifest_of([[15, 15, 15], [15], [15], [15]]), in_place(4, profile=PROFILE))
    assert plan.forward_forecast is not None
    assert plan.forward_forecast.predicted_imbalance == pytest.approx(4 / 3)
    assert "the tolerance is missed" in plan.reason


def test_who_receives_nothing_is_left_alone() -> None:
    servers = in_place(3, profile=PROFILE)
    closed = PlanningServer(
        server=servers[1].server, host=servers[1].host, profile=PROFILE, receives=False
    )
    moved = rows_moved(
        plan_of(manifest_of([[LONG], [SHORT], [SHORT]]), [servers[0], closed, servers[2]])
    )
    assert {server for _, server in moved} == {2}


@pytest.mark.parametrize("n_pool", [1, 3])
def test_pool_servers_take_their_share(n_pool: int) -> None:
    servers = [*in_place(2, profile=PROFILE), *pool(n_pool, profile=PROFILE)]
    plan = plan_of(manifest_of([[LONG], [LONG]]), servers)
    assert plan.forward_forecast is not None
    assert plan.forward_forecast.predicted_imbalance <= 1.05 + 1e-3
    assert np.unique(plan.forward.server).tolist() == list(range(2 + n_pool))
