"""Servers that cannot hold what their own rank has."""

from __future__ import annotations

from control_plane.planner.planning import PlanningServer
from core_attention.arrays import Int64Array
from core_attention.plan import Plan
from tests.service.control_plane.planner.small_plans import (
    PROFILE,
    manifest_of,
    plan_of,
    rows_moved,
)
from tests.support.planning_cases import in_place

LEVEL = 1e9
"""A tolerance at which nothing moves but for memory."""


def servers_of(capacities: list[int | None]) -> list[PlanningServer]:
    return [
        PlanningServer(server=s.server, host=s.host, profile=PROFILE, capacity_rows=rows)
        for s, rows in zip(in_place(len(capacities), profile=PROFILE), capacities, strict=True)
    ]


def rows_held(plan: Plan) -> Int64Array:
    forecast = plan.forward_forecast
    assert forecast is not None
    rows: Int64Array = (forecast.q_rows + forecast.kv_rows)[0]
    return rows


def test_who_can_hold_its_rows_gives_nothing_away() -> None:
    manifest = manifest_of([[4096, 1024], [1024], [1024]])
    plan = plan_of(manifest, servers_of([10_240, 10_240, 10_240]), tolerance=LEVEL)
    assert not rows_moved(plan)


def test_rows_that_do_not_fit_go_where_most_time_is_left() -> None:
    manifest = manifest_of([[4096, 1024], [2048], [1024]])
    plan = plan_of(manifest, servers_of([9000, 20_000, 20_000]), tolerance=LEVEL)
    assert set(rows_moved(plan)) == {(0, 2)}
    assert (rows_held(plan) <= [9000, 20_000, 20_000]).all()


def test_what_frees_most_rows_for_a_byte_goes() -> None:
    """The end of the short document frees as many rows as that of the long one, which would take
    its keys along."""
    manifest = manifest_of([[4096, 2048], [1024]])
    plan = plan_of(manifest, servers_of([11_500, 20_000]), tolerance=LEVEL)
    away = plan.forward.server == 1
    assert plan.forward.document[away].tolist() == [1, 2]
    assert rows_held(plan)[0] <= 11_500


def test_a_holder_needs_room_for_queries_and_keys() -> None:
    manifest = manifest_of([[4096, 1024], [1024], [1024]])
    plan = plan_of(manifest, servers_of([9000, 2100, 20_000]), tolerance=LEVEL)
    assert set(rows_moved(plan)) == {(0, 2)}
