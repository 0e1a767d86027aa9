"""When a planner is compiled, when it is not, and what is said about it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from control_plane.cold_start import planner as module
from control_plane.cold_start.planner import ATTEMPTS, ColdPlanner, PlannerState
from control_plane.cold_start.uncompiled import UncompiledPlanners
from control_plane.planner import compiled
from control_plane.planner.planning import PlanningOptions
from core_attention.plan import Plan
from tests.support.planning_cases import SHAPE, pool, stream_manifest
from tests.support.waiting import eventually

MANIFEST, SERVERS = stream_manifest([900, 200, 500, 30], 2), pool(2)


class Uncompiled(UncompiledPlanners):
    """Plans nothing: it waits until nobody wants its plan."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def start(self) -> None:
        """There is no process."""

    def plan(self, *args: Any, is_wanted: Callable[[], bool], **kwargs: Any) -> Plan | None:
        self.asked.set()
        while is_wanted():
            time.sleep(0.01)
        return None


class Machine:
    """What a planner finds: a cache, and what becomes of processes that compile into it.

    Attributes:
        in_cache: whether the machine code is there.
        compiles: does what the compiling process does, and says how it failed.
        states, n_failures: what was told.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.in_cache = False
        self.compiles: Callable[[], str] = self.succeeds
        self.states: list[PlannerState] = []
        self.n_failures = 0
        self.uncompiled = Uncompiled()
        monkeypatch.setattr(module, "load", lambda planner: self.in_cache)
        monkeypatch.setattr(module, "PAUSE_SECONDS", 0.0)
        monkeypatch.setattr(ColdPlanner, "_compile_beside", lambda planner: self.compiles())
        self.planner = ColdPlanner(
            "balanced",
            self.uncompiled,
            on_change=lambda name, state: self.states.append(state),
            on_failure=self._failed,
        )

    def succeeds(self) -> str:
        self.in_cache = True
        return ""

    def plan(self) -> Plan:
        return self.planner(MANIFEST, SERVERS, SHAPE, PlanningOptions())

    def settle(self, state: PlannerState) -> None:
        eventually(lambda: self.planner.state is state, 30.0)

    def _failed(self) -> None:
        self.n_failures += 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(monkeypatch)
    yield machine
    machine.planner.close()


def test_machine_code_that_is_there_is_used(machine: Machine) -> None:
    machine.in_cache = True
    assert "uncompiled" not in machine.plan().reason
    assert machine.states == [PlannerState.COMPILED]
    assert not machine.uncompiled.asked.is_set()


def test_a_plan_under_way_is_made_compiled_once_that_is_possible(machine: Machine) -> None:
    go_on = threading.Event()

    def compiles() -> str:
        assert go_on.wait(30.0)
        return machine.succeeds()

    machine.compiles = compiles
    plans: list[Plan] = []
    thread = threading.Thread(target=lambda: plans.append(machine.plan()))
    thread.start()
    assert machine.uncompiled.asked.wait(30.0)
    assert machine.planner.state is PlannerState.COMPILING
    go_on.set()
    thread.join(30.0)
    assert plans[0].planner == "balanced"
    assert machine.states == [PlannerState.COMPILING, PlannerState.COMPILED]


def test_a_compiler_that_dies_is_tried_again(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    ends = iter(["was killed by signal 9", ""])
    machine.compiles = lambda: next(ends) or machine.succeeds()
    machine.planner.start()
    machine.settle(PlannerState.COMPILED)
    assert machine.n_failures == 1
    assert "planner balanced was killed by signal 9 (attempt 1 of 3)" in caplog.text


def test_after_some_attempts_it_stays_uncompiled_and_says_so_once(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.compiles = lambda: "exited with code 1: OSError: [Errno 28] No space left on device"
    machine.planner.start()
    machine.settle(PlannerState.UNCOMPILED)
    assert machine.n_failures == ATTEMPTS
    assert sum("stays uncompiled" in message for message in caplog.messages) == 1
    assert "No space left on device" in caplog.text


def test_a_compiler_that_leaves_nothing_has_failed(machine: Machine) -> None:
    machine.compiles = lambda: ""
    machine.planner.start()
    machine.settle(PlannerState.UNCOMPILED)
    assert machine.n_failures == ATTEMPTS


def test_without_any_folder_it_compiles_here(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepared: list[object] = []
    monkeypatch.setattr(compiled, "has_cache", lambda: False)
    monkeypatch.setattr(module, "prepare", prepared.append)
    machine.planner.start()
    machine.settle(PlannerState.COMPILED)
    assert len(prepared) == 1
    assert "no folder can keep machine code" in caplog.text


def test_a_temporary_folder_is_said_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "temporary_cache", lambda: "/cache is read-only")
    machine.planner.start()
    machine.settle(PlannerState.COMPILED)
    assert sum("/cache is read-only" in message for message in caplog.messages) == 1
    assert "NUMBA_CACHE_DIR" in caplog.text


def test_closing_ends_a_plan_that_waits(machine: Machine) -> None:

    def compiles() -> str:
        assert machine.planner._closing.wait(30.0)
        return "was killed by signal 9"

    machine.compiles = compiles
    errors: list[BaseException] = []

    def plan() -> None:
        try:
            machine.plan()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=plan)
    thread.start()
    assert machine.uncompiled.asked.wait(30.0)
    machine.planner.close()
    thread.join(30.0)
    assert "the control plane ends" in str(errors[0])
