"""Processes beside the control plane; the one that plans uncompiled makes the same plans."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from control_plane.cold_start.child import Child
from control_plane.cold_start.planner import NOTE, plan_uncompiled
from control_plane.planner.planners import PLANNERS
from control_plane.planner.planning import PlanningOptions, PlanningServer
from core_attention.errors import PlanError
from core_attention.manifest import Manifest
from core_attention.plan import Plan
from tests.support.planning_cases import SHAPE, in_place, pool, stream_manifest
from tests.support.waiting import eventually

LENGTHS = [9000, 200, 5000, 30, 700, 8000, 1, 20_000, 64, 3000]

CASES = {
    "in place": (stream_manifest(LENGTHS, 4), in_place(4)),
    "pool": (stream_manifest(LENGTHS, 2, n_nano_batches=2), pool(3)),
    "mixed, spanning": (stream_manifest(LENGTHS, 3, span=True), in_place(3) + pool(1)),
    "many ranks": (stream_manifest(LENGTHS * 12, 48), in_place(48, servers_per_host=8)),
}


@pytest.fixture(scope="module")
def uncompiled() -> Iterator[Child]:
    child = Child({"NUMBA_DISABLE_JIT": "1"})
    yield child
    child.close()


def planned(
    child: Child,
    name: str,
    manifest: Manifest,
    servers: list[PlanningServer],
    options: PlanningOptions | None = None,
    *,
    wanted: bool = True,
) -> Plan | None:
    options = options or PlanningOptions(tolerance=0.05)
    request = name, manifest, servers, SHAPE, options, 7
    plan: Plan | None = child.ask(plan_uncompiled, *request, is_wanted=lambda: wanted)
    return plan


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_plans_are_the_compiled_planners_to_the_bit(
    uncompiled: Child, name: str, case: str
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


def test_a_planners_refusal_comes_back(uncompiled: Child) -> None:
    manifest, _ = CASES["in place"]
    servers = in_place(4, capacity_rows=10)
    with pytest.raises(PlanError) as expected:
        PLANNERS["balanced"](manifest, servers, SHAPE, PlanningOptions())
    with pytest.raises(PlanError) as refused:
        planned(uncompiled, "balanced", manifest, servers, PlanningOptions())
    assert str(refused.value) == str(expected.value)


def test_nothing_waits_for_an_answer_that_nobody_wants() -> None:
    child = Child({})
    assert child.ask(time.sleep, 3600.0, is_wanted=lambda: False) is None
    assert child.close() == "was not started"


def test_a_process_that_dies_is_started_again() -> None:
    child = Child({})
    try:
        with pytest.raises(ChildProcessError):
            child.ask(signal.raise_signal, signal.SIGKILL, is_wanted=lambda: True)
        with pytest.raises(ChildProcessError):
            child.ask(os._exit, 3, is_wanted=lambda: True)
        assert child.ask(os.getppid, is_wanted=lambda: True) == os.getpid()
    finally:
        child.close()


PARENT = """
import os, time
from control_plane.cold_start.child import Child
child = Child({})
print(child.ask(os.getpid, is_wanted=lambda: True), flush=True)
child.ask(time.sleep, 3600.0, is_wanted=lambda: True)
"""


def test_it_ends_with_the_process_that_started_it() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    eventually(lambda: not child.is_running(), 30.0)
