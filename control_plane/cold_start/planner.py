"""A planner that plans at once, compiled or not."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from control_plane.cold_start.child import Child
from control_plane.planner import at_home, compiled
from control_plane.planner.planners import PLANNERS, load, prepare
from control_plane.planner.planning import PlanningOptions, PlanningServer
from core_attention.errors import PlanError
from core_attention.manifest import Manifest
from core_attention.plan import Plan
from core_attention.shape import AttentionShape
from distca.contract.timeouts import default_seconds

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often compiling is tried in a process of its own."""
PAUSE_SECONDS = 10.0
"""Between two attempts: what killed the first, such as a lack of memory, may pass."""
SLOW_SECONDS = default_seconds("late_plan_seconds")
"""A plan that takes longer uncompiled is the last one made so: it comes too late for its step."""
SETTLE_SECONDS = 600.0
"""How long a plan that cannot leave documents at home waits for the machine code."""
MOST_DEATHS = 2
"""After so many the process that plans uncompiled is not started again."""
NICENESS = 10
"""The process that compiles may take longer where the machine has other things to do."""
MOST_CHARACTERS = 300
"""How much of an error of that process goes to the log."""
NOTE = "planned uncompiled, while the planner's machine code is compiled"
"""The end of such a plan's reason."""
END_SECONDS = 5.0
"""How long closing waits for a process that was killed; only compiling in this one takes longer."""


class PlannerState(StrEnum):
    """The ways in which a planner runs.

    Attributes:
        IDLE: nobody has asked for it.
        COMPILED: at its full speed.
        COMPILING: uncompiled, until its machine code is there.
        UNCOMPILED: uncompiled, and it stays so: compiling has failed.
    """

    IDLE = "idle"
    COMPILED = "compiled"
    COMPILING = "compiling"
    UNCOMPILED = "uncompiled"


class ColdPlanner:
    """Planner ``name`` of :data:`PLANNERS`: compiled as soon as it can be. Until then uncompiled
    where that is quick enough; else documents stay at home.

    Thread-safe.

    Args:
        name: the planner's.
        on_change: called with each new state, on any thread.
    """

    def __init__(
        self,
        name: str,
        *,
        on_change: Callable[[str, PlannerState], None] = lambda name, state: None,
    ) -> None:
        self._name = name
        self._planner = PLANNERS[name]
        # Where numba compiles nothing.
        self._uncompiled = Child({"NUMBA_DISABLE_JIT": "1"})
        self._asking = threading.Lock()
        self._n_deaths = 0
        self._is_slow = self._has_planned = False
        self._on_change = on_change
        self._lock = threading.Lock()
        self._closing = threading.Event()
        # It is compiled, or will not be.
        self._settled = threading.Event()
        self._thread: threading.Thread | None = None
        self.state = PlannerState.IDLE

    def __call__(
        self,
        manifest: Manifest,
        servers: Sequence[PlanningServer],
        shape: AttentionShape,
        options: PlanningOptions,
        *,
        epoch: int = 0,
    ) -> Plan:
        """As :class:`Planner`."""
        self.start()
        if not (self._is_compiled or self._is_slow):
            plan = self._plan_uncompiled(manifest, servers, shape, options, epoch)
            if plan is not None:
                return plan
        if not self._is_compiled:
            try:
                why = f"the planner is {self.state}"
                return at_home.plan(manifest, servers, shape, options, epoch=epoch, why=why)
            except PlanError:
                # A better plan may fit.
                self._settled.wait(SETTLE_SECONDS)
                if not self._is_compiled:
                    raise
        return self._planner(manifest, servers, shape, options, epoch=epoch)

    def _plan_uncompiled(self, *request: Any) -> Plan | None:
        """None if the planner is compiled meanwhile, ends, or no process can make the plan."""
        started = time.monotonic()
        with self._asking:
            while not self._is_over() and self._n_deaths < MOST_DEATHS:
                try:
                    plan: Plan | None = self._uncompiled.ask(
                        plan_uncompiled,
                        self._name,
                        *request,
                        is_wanted=lambda: not self._is_over(),
                    )
                except OSError as error:
                    self._n_deaths += 1
                    logger.error("the process that plans uncompiled %s", error)
                    continue
                # The first plan may have waited for the process to start.
                self._is_slow = self._has_planned and time.monotonic() - started > SLOW_SECONDS
                self._has_planned = True
                return plan
        return None

    def _is_over(self) -> bool:
        return self._closing.is_set() or self._is_compiled

    @property
    def _is_compiled(self) -> bool:
        return self.state is PlannerState.COMPILED

    def start(self) -> None:
        """Loads the machine code, which takes a second; or begins to compile it."""
        with self._lock:
            if self.state is not PlannerState.IDLE or self._closing.is_set():
                return
            if load(self._planner):
                self._become(PlannerState.COMPILED)
                return
            self._become(PlannerState.COMPILING)
            logger.info(
                "compiling planner %s, a minute or two; plans are made uncompiled until then",
                self._name,
            )
            self._thread = threading.Thread(
                target=self._compile, name=f"compile-{self._name}", daemon=True
            )
            self._thread.start()
        with self._asking, contextlib.suppress(OSError):
            self._uncompiled.start()

    def close(self) -> None:
        """Plans no more, and compiles no more."""
        self._closing.set()
        self._settled.set()
        if self._thread is not None:
            self._thread.join(END_SECONDS)
        with self._asking:
            self._uncompiled.close()

    def _compile(self) -> None:
        started = time.monotonic()
        if compiled.temporary_cache():
            logger.warning(
                "machine code is not kept, so the next start compiles anew: %s; set "
                "NUMBA_CACHE_DIR to a folder that can be written to",
                compiled.temporary_cache(),
            )
        if self._obtain_code():
            self._become(PlannerState.COMPILED)
            logger.info("planner %s is compiled, %.0f s", self._name, time.monotonic() - started)
        elif not self._closing.is_set():
            self._become(PlannerState.UNCOMPILED)
            logger.error(
                "planner %s stays uncompiled: large steps are not balanced; mend the cause and "
                "start the control plane again",
                self._name,
            )

    def _obtain_code(self) -> bool:
        """Return whether the machine code is loaded."""
        if not compiled.has_cache():
            logger.warning(
                "no folder can keep machine code, not even a temporary one: planner %s is compiled "
                "in this process, which answers calls more slowly meanwhile",
                self._name,
            )
            prepare(self._planner)
            return True
        for attempt in range(ATTEMPTS):
            if attempt and self._closing.wait(PAUSE_SECONDS):
                return False
            failure = self._compile_beside()
            if not failure and not load(self._planner):
                failure = "left no machine code in the cache"
            if not failure or self._closing.is_set():
                return not failure
            logger.error(
                "the process that compiles planner %s: %s (attempt %d of %d)",
                self._name,
                failure,
                attempt + 1,
                ATTEMPTS,
            )
        return False

    def _compile_beside(self) -> str:
        """Compiles in another process, into the cache; how that failed, or nothing."""
        folder = compiled.cache_folder()
        compiler = Child({"NUMBA_CACHE_DIR": folder} if folder else {}, NICENESS)
        try:
            compiler.ask(compile_planner, self._name, is_wanted=lambda: not self._closing.is_set())
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]
        finally:
            compiler.close()
        return ""

    def _become(self, state: PlannerState) -> None:
        self.state = state
        if state in (PlannerState.COMPILED, PlannerState.UNCOMPILED):
            self._settled.set()
        self._on_change(self._name, state)
        if state is PlannerState.COMPILED:
            with self._asking:
                self._uncompiled.close()


def compile_planner(name: str) -> None:
    """Compiles planner ``name`` into numba's cache."""
    prepare(PLANNERS[name])


def plan_uncompiled(name: str, *request: Any) -> Plan:
    """A plan of planner ``name``, where numba compiles nothing."""
    *values, epoch = request
    # Compiled integers wrap around in silence, and so do these.
    with np.errstate(over="ignore"):
        plan = PLANNERS[name](*values, epoch=epoch)
    return dataclasses.replace(plan, reason=f"{plan.reason}; {NOTE}", tasks_are_valid=True)
