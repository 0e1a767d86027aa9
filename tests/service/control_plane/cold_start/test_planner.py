"""When a planner is compiled, when it is not, and what is said about it."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from control_plane.cold_start import planner as module
from control_plane.cold_start.child import Child
from control_plane.cold_start.planner import (
    ATTEMPTS,
    MOST_DEATHS,
    ColdPlanner,
    PlannerState,
    compile_planner,
)
from control_plane.planner import at_home, compiled
from control_plane.planner.planners import PLANNERS
from control_plane.planner.planning import PlanningOptions
from core_attention.errors import PlanError
from core_attention.plan import AT_HOME, Plan
from tests.support.planning_cases import SHAPE, pool, stream_manifest
from tests.support.waiting import eventually

MANIFEST, SERVERS = stream_manifest([900, 200, 500, 30], 2), pool(2)


class Machine:
    """What a planner finds: a cache, and processes that compile into it and plan uncompiled.

    Attributes:
        in_cache: whether the machine code is there.
        compiles: does what the compiling process does, and says how it failed.
        can_plan: False: no process can be started that plans uncompiled.
        answer: the plan that it makes; None: it waits until nobody wants it.
        n_asked: the plans that were wanted.
        states: what was told.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.in_cache = False
        self.compiles: Callable[[], str] = self.succeeds
        self.can_plan = True
        self.answer: Plan | None = None
        self.n_asked = 0
        self.states: list[PlannerState] = []
        monkeypatch.setattr(module, "load", lambda planner: self.in_cache)
        monkeypatch.setattr(module, "PAUSE_SECONDS", 0.0)
        monkeypatch.setattr(Child, "start", lambda child: None)
        monkeypatch.setattr(Child, "ask", self.ask)
        self.planner = ColdPlanner(
            "balanced",
            on_change=lambda name, state: self.states.append(state),
        )

    def ask(
        self, work: Callable[..., Any], *args: Any, is_wanted: Callable[[], bool]
    ) -> Plan | None:
        if work is compile_planner:
            if failure := self.compiles():
                raise ChildProcessError(failure)
            return None
        self.n_asked += 1
        if not self.can_plan:
            raise OSError(errno.EAGAIN, "no more processes")
        while self.answer is None and is_wanted():
            time.sleep(0.01)
        return self.answer

    def succeeds(self) -> str:
        self.in_cache = True
        return ""

    def plan(self) -> Plan:
        return self.planner(MANIFEST, SERVERS, SHAPE, PlanningOptions())

    def settle(self, state: PlannerState) -> None:
        eventually(lambda: self.planner.state is state, 30.0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(monkeypatch)
    yield machine
    machine.planner.close()


def test_machine_code_that_is_there_is_used(machine: Machine) -> None:
    machine.in_cache = True
    assert machine.plan().planner == "balanced"
    assert machine.states == [PlannerState.COMPILED]
    assert not machine.n_asked


def test_a_plan_under_way_is_made_compiled_once_that_is_possible(machine: Machine) -> None:
    go_on = threading.Event()

    def compiles() -> str:
        go_on.wait(30.0)
        return machine.succeeds()

    machine.compiles = compiles
    with ThreadPoolExecutor(1) as thread:
        plan = thread.submit(machine.plan)
        eventually(lambda: machine.n_asked == 1)
        go_on.set()
        assert plan.result(30.0).planner == "balanced"


def test_documents_stay_at_home_where_plans_made_uncompiled_are_slow(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOW_SECONDS", -1.0)
    machine.compiles = lambda: "was killed by signal 9"
    machine.answer = compiled_plan = PLANNERS["balanced"](
        MANIFEST, SERVERS, SHAPE, PlanningOptions(), epoch=0
    )
    # The first one may have waited for the process.
    assert [machine.plan() for _ in range(2)] == [compiled_plan] * 2
    assert machine.plan().planner == AT_HOME
    assert machine.n_asked == 2


def test_documents_stay_at_home_where_nothing_plans_uncompiled(machine: Machine) -> None:
    machine.can_plan = False
    go_on = threading.Event()

    def compiles() -> str:
        assert go_on.wait(30.0)
        return machine.succeeds()

    machine.compiles = compiles
    assert machine.plan().planner == AT_HOME
    assert machine.n_asked == MOST_DEATHS
    go_on.set()
    machine.settle(PlannerState.COMPILED)
    assert machine.plan().planner == "balanced"
    assert machine.states == [PlannerState.COMPILING, PlannerState.COMPILED]


def test_a_compiler_that_dies_is_tried_again(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    ends = iter(["was killed by signal 9", ""])
    machine.compiles = lambda: next(ends) or machine.succeeds()
    machine.planner.start()
    machine.settle(PlannerState.COMPILED)
    assert "killed by signal 9 (attempt 1 of 3)" in caplog.text


@pytest.mark.parametrize("end", ["exited with code 1: no space", ""])
def test_after_some_attempts_it_stays_uncompiled_and_says_so_once(
    machine: Machine, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    """Also of a compiler that ends well and leaves nothing."""
    machine.compiles = lambda: end
    machine.planner.start()
    machine.settle(PlannerState.UNCOMPILED)
    assert f"(attempt {ATTEMPTS} of {ATTEMPTS})" in caplog.text
    assert sum("stays uncompiled" in message for message in caplog.messages) == 1
    assert end in caplog.text


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


@pytest.mark.parametrize("ends", ["compiled", "closed"])
def test_what_fits_on_no_server_whole_waits_for_the_planner(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    machine.can_plan = False
    go_on = threading.Event()

    def refuse(*_: Any, **__: Any) -> Plan:
        raise PlanError("it fits nowhere")

    monkeypatch.setattr(at_home, "plan", refuse)

    def compiles() -> str:
        go_on.wait(30.0)
        return machine.succeeds()

    machine.compiles = compiles
    with ThreadPoolExecutor(2) as threads:
        plan = threads.submit(machine.plan)
        with pytest.raises(TimeoutError):
            plan.result(0.1)
        if ends == "compiled":
            go_on.set()
            assert plan.result(30.0).planner == "balanced"
        else:
            threads.submit(machine.planner.close)
            with pytest.raises(PlanError):
                plan.result(30.0)
            go_on.set()
