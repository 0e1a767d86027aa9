"""The process that runs planners uncompiled, as the control plane sees it."""

from __future__ import annotations

import logging
import multiprocessing
import subprocess
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from control_plane.cold_start.child import how_it_ended, start_child
from control_plane.planner.planning import PlanningOptions, PlanningServer
from core_attention.manifest import Manifest
from core_attention.plan import Plan
from core_attention.shape import AttentionShape

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
"""How often a wait for a plan looks whether it is wanted still."""
MOST_DEATHS = 2
"""After so many the process is not started again."""


class UncompiledPlanners:
    """Plans in a process where numba compiles nothing, one plan at a time; started on first use.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._n_deaths = 0

    def start(self) -> None:
        """Starts the process already, so that the first plan need not wait for it."""
        with self._lock:
            self._connected()

    def plan(
        self,
        name: str,
        manifest: Manifest,
        servers: Sequence[PlanningServer],
        shape: AttentionShape,
        options: PlanningOptions,
        *,
        epoch: int,
        is_wanted: Callable[[], bool],
    ) -> Plan | None:
        """The plan of planner ``name``; None once it is not wanted any more, or if no process can
        make it. Raises as the planner."""
        with self._lock:
            while is_wanted() and (connection := self._connected()) is not None:
                try:
                    connection.send((name, manifest, servers, shape, options, epoch))
                    while not connection.poll(POLL_SECONDS):
                        if not is_wanted():
                            self._end()
                            return None
                    answer = connection.recv()
                except (EOFError, OSError):
                    self._died()
                    continue
                if isinstance(answer, Exception):
                    raise answer
                assert isinstance(answer, Plan)
                return answer
        return None

    def close(self) -> None:
        """Ends the process. A plan in the making has to be unwanted before."""
        with self._lock:
            self._end()

    def _connected(self) -> Connection | None:
        if self._connection is not None or self._n_deaths >= MOST_DEATHS:
            return self._connection
        ours, theirs = multiprocessing.Pipe()
        try:
            self._process = start_child(
                "control_plane.cold_start.uncompiled_process",
                [str(theirs.fileno())],
                {"NUMBA_DISABLE_JIT": "1"},
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        except OSError as error:
            ours.close()
            self._n_deaths = MOST_DEATHS
            logger.error("no process can be started to plan uncompiled: %s", error)
            return None
        finally:
            theirs.close()
        self._connection = ours
        return ours

    def _died(self) -> None:
        assert self._process is not None
        self._n_deaths += 1
        self._process.kill()
        logger.error("the process that plans uncompiled %s", how_it_ended(self._process))
        self._end()

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process = None
