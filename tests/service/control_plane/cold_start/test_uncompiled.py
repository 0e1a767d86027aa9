"""The process that plans while nothing is compiled makes the same plans."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from control_plane.cold_start.uncompiled import MOST_DEATHS, UncompiledPlanners
from control_plane.cold_start.uncompiled_process import NOTE
from control_plane.planner.planners import PLANNERS
from control_plane.planner.planning import PlanningOptions, PlanningServer
from core_attention.errors import PlanError
from core_attention.manifest import Manifest
from core_attention.plan import Plan
from tests.support.planning_cases import SHAPE, in_place, pool, stream_manifest

LENGTHS = [9000, 200, 5000, 30, 700, 8000, 1, 20_000, 64, 3000]

CASES = {
    "in place": (stream_manifest(LENGTHS, 4), in_place(4)),
    "pool": (stream_manifest(LENGTHS, 2, n_nano_batches=2), pool(3)),
    "mixed, spanning": (stream_manifest(LENGTHS, 3, span=True), in_place(3) + pool(1)),
    "many ranks": (stream_manifest(LENGTHS * 12, 48), in_place(48, servers_per_host=8)),
}


@pytest.fixture(scope="module")
def uncompiled() -> Iterator[UncompiledPlanners]:
    planners = UncompiledPlanners()
    yield planners
    planners.close()


def planned(
    planners: UncompiledPlanners,
    name: str,
    manifest: Manifest,
    servers: list[PlanningServer],
    options: PlanningOptions | None = None,
    *,
    wanted: bool = True,
) -> Plan | None:
    return planners.plan(
        name,
        manifest,
        servers,
        SHAPE,
        options or PlanningOptions(tolerance=0.05),
        epoch=7,
        is_wanted=lambda: wanted,
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_plans_are_the_compiled_planners_to_the_bit(
    uncompiled: UncompiledPlanners, name: str, case: str
) -> None:
    manifest, servers = CASES[case]
    plan = planned(uncompiled, name, manifest, servers)
    expected = PLANNERS[name](manifest, servers, SHAPE, PlanningOptions(tolerance=0.05), epoch=7)
    assert plan is not None
    assert (plan.planner, plan.epoch, plan.servers) == (name, 7, expected.servers)
    assert plan.reason == f"{expected.reason}; {NOTE}"
    for table in ("forward", "backward", "forward_forecast", "backward_forecast"):
        ours, theirs = getattr(plan, table), getattr(expected, table)
        for field in dataclasses.fields(theirs):
            assert np.array_equal(getattr(ours, field.name), getattr(theirs, field.name)), table


def test_a_planners_refusal_comes_back(uncompiled: UncompiledPlanners) -> None:
    manifest, _ = CASES["in place"]
    servers = in_place(4, capacity_rows=10)
    with pytest.raises(PlanError) as expected:
        PLANNERS["balanced"](manifest, servers, SHAPE, PlanningOptions())
    with pytest.raises(PlanError) as refused:
        planned(uncompiled, "balanced", manifest, servers, PlanningOptions())
    assert str(refused.value) == str(expected.value)


def test_nothing_waits_for_a_plan_that_nobody_wants(uncompiled: UncompiledPlanners) -> None:
    assert planned(uncompiled, "balanced", *CASES["pool"], wanted=False) is None


def test_a_process_that_dies_is_started_again_and_then_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    planners = UncompiledPlanners()
    try:
        for _ in range(MOST_DEATHS):
            planners.start()
            process = planners._process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            plan = planned(planners, "balanced", *CASES["pool"])
        assert plan is None
    finally:
        planners.close()
    assert (
        caplog.messages
        == ["the process that plans uncompiled was killed by signal 9"] * MOST_DEATHS
    )
