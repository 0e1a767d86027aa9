"""Servers as columns, and what is refused of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from control_plane.planner.fleet import UNLIMITED_ROWS, build_fleet, pace_of
from core_attention.errors import PlanError
from tests.service.control_plane.planner.compiled_calls import callable_from_python
from tests.support.planning_cases import PROFILE, in_place, pool, uniform_profile


def test_columns_are_in_the_order_of_the_servers() -> None:
    servers = [*pool(1, speed=0.5), *reversed(in_place(2, receives=False, capacity_rows=7))]
    fleet = build_fleet(servers, 3)
    assert fleet.rank.tolist() == [-1, 1, 0]
    assert fleet.server_of_rank.tolist() == [2, 1, -1]
    assert fleet.speed.tolist() == [0.5, 1.0, 1.0]
    assert fleet.receives.tolist() == [True, False, False]
    assert fleet.capacity_rows.tolist() == [UNLIMITED_ROWS, 7, 7]
    assert fleet.is_limited
    assert not fleet.is_based
    assert not fleet.base.any()


def test_no_limit_and_bases_are_known() -> None:
    servers = in_place(2)
    servers[1] = replace(servers[1], base_seconds=(1.0, 2.0))
    fleet = build_fleet(servers, 2)
    assert not fleet.is_limited
    assert fleet.capacity_rows.tolist() == [UNLIMITED_ROWS] * 2
    assert fleet.is_based
    np.testing.assert_array_equal(fleet.base, [[0.0, 1.0], [0.0, 2.0]])


def test_each_server_has_its_own_profile_and_speed() -> None:
    slow = [replace(server, speed=0.25) for server in pool(1, profile=uniform_profile())]
    fleet = build_fleet([*in_place(2, profile=PROFILE), *slow], 2)
    assert fleet.profile.tolist() == [0, 0, 1]
    pace = callable_from_python(pace_of)(fleet, 2, 1)
    assert (pace[1], pace[2], pace[3]) == (1, 1, 0.25)


def test_impossible_places_are_named() -> None:
    with pytest.raises(PlanError, match="no servers: a plan needs at least one"):
        build_fleet([], 2)
    with pytest.raises(PlanError, match=r"rank-2 is in-place on rank 2; the step has ranks 0 to 1"):
        build_fleet(in_place(3), 2)
    twice = [*in_place(2), replace(in_place(2)[1], host="another")]
    with pytest.raises(PlanError, match="rank-1 and rank-1 are both in-place on rank 1"):
        build_fleet(twice, 2)
