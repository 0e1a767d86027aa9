"""Work of ranks without a server."""

from __future__ import annotations

import numpy as np
import pytest

from control_plane.planner.planning import PlanningServer
from core_attention.arrays import Float64Array
from core_attention.plan import Plan
from tests.service.control_plane.planner.small_plans import (
    LONG,
    PROFILE,
    SHORT,
    manifest_of,
    plan_of,
)
from tests.support.planning_cases import pool


def pool_of(
    speeds: list[float], capacities: list[int | None] | None = None
) -> list[PlanningServer]:
    rows = capacities or [None] * len(speeds)
    return [
        PlanningServer(
            server=s.server, host=s.host, profile=PROFILE, speed=speed, capacity_rows=most
        )
        for s, speed, most in zip(pool(len(speeds)), speeds, rows, strict=True)
    ]


def pairs_by_server(plan: Plan) -> Float64Array:
    tasks = plan.forward
    pairs = (tasks.q_end * (tasks.q_end + 1) - tasks.q_begin * (tasks.q_begin + 1)) / 2
    by_server = np.zeros(len(plan.servers))
    np.add.at(by_server, tasks.server, pairs)
    return by_server


def test_equal_documents_are_dealt_out_whole() -> None:
    plan = plan_of(manifest_of([[SHORT] * 6]), pool_of([1.0, 1.0, 1.0]))
    assert np.bincount(plan.forward.server).tolist() == [2, 2, 2]
    assert len(plan.forward.document) == 6


def test_a_document_that_fits_nowhere_is_cut_from_its_end() -> None:
    plan = plan_of(manifest_of([[LONG, SHORT]]), pool_of([1.0, 1.0]))
    long = plan.forward.document == 0
    assert len(plan.forward.document) == 3, "one cut, and the short document stays whole"
    cut = int(plan.forward.q_begin[long].max())
    assert cut % 16 == 0
    assert cut > LONG // 2, "the end has more pairs a query"
    busy = pairs_by_server(plan)
    assert busy.max() <= 1.05 * busy.mean() * 1.002


def test_the_longest_come_first_and_the_short_ones_fill_up() -> None:
    lengths = [SHORT, SHORT * 3, SHORT * 2, SHORT, SHORT * 2, SHORT * 3]
    plan = plan_of(manifest_of([lengths]), pool_of([1.0, 1.0]), tolerance=0.2)
    assert len(plan.forward.document) == 6
    assert pairs_by_server(plan).tolist() == pytest.approx([pairs_by_server(plan).mean()] * 2)


def test_where_memory_is_short_a_server_with_rows_left_takes_it() -> None:
    """The first server has the most time, and no rows."""
    servers = pool_of([4.0, 1.0], [SHORT, 100 * SHORT])
    plan = plan_of(manifest_of([[2 * SHORT, 2 * SHORT]]), servers)
    assert set(plan.forward.server.tolist()) == {1}
