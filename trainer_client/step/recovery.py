"""The recovery of one rank: its steps, from beginning one until every rank has finished it.

See ``docs/fault_tolerance.md``. Three threads come here: the training loop begins and ends steps;
the link's thread tells of recoveries, plans and finished steps, in the control plane's order; and a
thread of this module connects to the servers of new plans and replays, which may take a while.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from attention_node.tick_server import TickServer
from core_attention.ca_task import Phase
from data_plane.buffer_pool import BufferPool
from distca.v1 import jobs_pb2
from trainer_client.step.exchanges import PlanInForce, Routes
from trainer_client.step.running_step import RunningStep
from trainer_client.step.servers import EpochOver, ServerLinks, ServersUnreachable
from trainer_client.step.step_book import PlannedStep

logger = logging.getLogger(__name__)


class Recovery:
    """The steps that this rank may have to replay.

    Args:
        links: to servers.
        in_place: this process's own server.
        job_id: names the job, once it is open.
        lost: told when a server fails: its id, the epoch of the plan, the cause.
        routes: makes this rank's routes under a plan.
        pool: what messages are taken from.
    """

    def __init__(
        self,
        links: ServerLinks,
        in_place: TickServer,
        job_id: Callable[[], str],
        lost: Callable[[str, int, str], None],
        routes: Callable[[PlannedStep], Routes],
        pool: BufferPool,
    ) -> None:
        self._pool = pool
        self._make_routes = routes
        self._links = links
        self._in_place = in_place
        self._job_id = job_id
        self._lost = lost
        self._lock = threading.Lock()
        self._epoch = 0
        self._steps: dict[int, RunningStep] = {}
        self._plans: dict[int, PlannedStep] = {}
        self._routes: dict[int, Routes] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="distca-recovery")

    def begin(self, running: RunningStep, planned: PlannedStep) -> None:
        """A step begins; its plan is put in force, unless a recovery has made it void."""
        with self._lock:
            # From here on a recovery asks this step how far it is.
            self._steps[running.step] = running
            newest = self._plans.get(running.step, planned)
            void = newest.plan.epoch < self._epoch
        if not void:
            self._put_in_force(running, newest, first_step=running.step)

    def ended(self, running: RunningStep) -> None:
        """The step's block has ended; if all is complete, its rows may still be asked for."""
        if not running.may_be_asked:
            running.release()

    def unfinished(self, step: int) -> bool:
        """Whether other ranks may still ask for rows of ``step`` or an earlier one."""
        with self._lock:
            return any(s.step <= step and s.may_be_asked for s in self._steps.values())

    def recover(
        self, epoch: int, lost: Sequence[str], reason: str
    ) -> Sequence[jobs_pb2.StepProgress]:
        """A recovery begins: nothing of earlier epochs counts any more. Returns how far this rank
        is in the steps that it has begun."""
        why = f"recovery with epoch {epoch}: {reason}"
        logger.warning("job %s: %s%s", self._job_id(), why, _without(lost))
        # In this order: what fails because connections close must find the steps suspended.
        with self._lock:
            self._epoch = epoch
            steps = list(self._steps.values())
            self._plans.clear()
        progress = [running.suspend(epoch, why) for running in steps]
        self._links.begin_epoch(epoch, why)
        self._in_place.recover(self._job_id(), epoch)
        return progress

    def planned(self, planned: PlannedStep) -> None:
        """A plan has come, for a step to come or for one that is under way."""
        self._in_place.add_plan(
            self._job_id(),
            planned.plan,
            forward_only=planned.forward_only,
            first_tick=planned.first_tick,
        )
        with self._lock:
            self._plans[planned.plan.step] = planned
            running = self._steps.get(planned.plan.step)
        if running is not None:
            self._thread.submit(self._resume, running, planned)
        else:
            self._thread.submit(self._derive_ahead, planned)

    def failed(self, step: int, reason: str) -> None:
        """A step gets no plan any more."""
        with self._lock:
            running = self._steps.get(step)
        if running is not None:
            running.fail(reason)

    def finished(self, step: int) -> None:
        """Every rank has finished ``step`` and those before."""
        with self._lock:
            over = [number for number in self._steps if number <= step]
            steps = [self._steps.pop(number) for number in over if self._steps[number].closed]
            for number in [number for number in self._plans if number <= step]:
                del self._plans[number]
            for number in [number for number in self._routes if number <= step]:
                del self._routes[number]
        for running in steps:
            running.release()

    def close(self) -> None:
        """Ends the thread, after what it does at the moment."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _resume(self, running: RunningStep, planned: PlannedStep) -> None:
        try:
            with self._lock:
                asked = [s.step for s in self._steps.values() if s.may_be_asked]
            self._put_in_force(running, planned, first_step=min([*asked, running.step]))
        except Exception as error:
            # Whatever breaks this thread would leave the training loop waiting: hand it over.
            logger.exception("step %d cannot go on", running.step)
            running.fail(f"its replay failed: {error!r}")

    def _put_in_force(self, running: RunningStep, planned: PlannedStep, *, first_step: int) -> None:
        plan = planned.plan
        try:
            connections = self._links.connect(
                plan, first_step, wanted=lambda: not running.abandoned
            )
        except EpochOver as error:
            logger.info("step %d: %s; waiting for its next plan", plan.step, error)
            return
        except ServersUnreachable as error:
            for server_id, cause in error.causes.items():
                self._lost(server_id, plan.epoch, f"step {plan.step}: cannot be reached: {cause}")
            running.trouble(str(error))
            return
        running.resume(PlanInForce(self._routes_under(planned), connections))

    def _routes_under(self, planned: PlannedStep) -> Routes:
        with self._lock:
            routes = self._routes.get(planned.plan.step)
        # Those of an earlier epoch are of another plan.
        return routes if routes and routes.plan is planned.plan else self._make_routes(planned)

    def _derive_ahead(self, planned: PlannedStep) -> None:
        """Before the step begins: its ticks should not wait for it."""
        try:
            routes = self._make_routes(planned)
            phases = [Phase.FORWARD] if planned.forward_only else list(Phase)
            self._pool.reserve(self, routes.derive_ahead(phases))
        except Exception:
            # The step does both itself, and tells what is wrong.
            logger.exception("step %d cannot be prepared ahead", planned.plan.step)
            return
        with self._lock:
            if planned.plan.step in self._plans:
                self._routes[planned.plan.step] = routes


def _without(lost: Sequence[str]) -> str:
    return f"; without {', '.join(lost)}" if lost else ""
