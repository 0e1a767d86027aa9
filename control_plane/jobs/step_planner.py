"""The planning of steps, off the event loop: for each job one at a time, first step first."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from control_plane.access.fair_threads import FairThreads
from control_plane.errors import InvalidRequestError
from control_plane.jobs.job import Job
from control_plane.jobs.membership import Member
from control_plane.jobs.publication import Publication, planning_servers, publish_step
from control_plane.jobs.step import ReadyStep
from control_plane.planner import at_home
from control_plane.planner.planning import Planner
from core_attention.errors import ManifestError, PlanError
from distca.contract.timeouts import default_seconds

logger = logging.getLogger(__name__)

LATE_PLAN_SECONDS = default_seconds("late_plan_seconds")
_AT_HOME = partial(at_home.plan, why=f"the planner takes longer than {LATE_PLAN_SECONDS:g} s")

Choices = Sequence[Sequence[Member]]
"""The servers of a step's plan, in their order; and those to take instead if these cannot do it."""

Planned = Callable[[Job, ReadyStep, Sequence[Member], Publication | str], None]
"""Takes the plan of a step and the servers that it was made with, or why there is none. The job is
open, and the step's epoch has not ended."""


@dataclass
class _Queue:
    """The ready steps of a job, a heap by epoch and step, and the task that plans them."""

    ready: list[tuple[int, int, ReadyStep, Choices]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class StepPlanner:
    """Plans the steps handed to it.

    Args:
        planners: by the names that jobs may give.
        default_planner: of jobs that give none.
        threads: jobs of one identity that are planned at the same time.
        on_planned: called on the event loop.
    """

    def __init__(
        self,
        planners: Mapping[str, Planner],
        *,
        default_planner: str,
        threads: int,
        on_planned: Planned,
    ) -> None:
        self._on_planned = on_planned
        self._planners = planners
        self._default_planner = default_planner
        self.planner_of(default_planner)
        self._queues: dict[str, _Queue] = {}
        self._threads = FairThreads(threads, "planning")

    def planner_of(self, name: str) -> Planner:
        """The planner called ``name``, the default one if it is empty."""
        chosen = name or self._default_planner
        if chosen not in self._planners:
            raise InvalidRequestError(f"planner is {chosen!r}; valid are {sorted(self._planners)}")
        return self._planners[chosen]

    def add(self, job: Job, ready: ReadyStep, choices: Choices) -> None:
        """Has a step planned, after the job's earlier steps that wait."""
        queue = self._queues.setdefault(job.job_id, _Queue())
        heapq.heappush(queue.ready, (ready.epoch, ready.step, ready, choices))
        if queue.task is None:
            queue.task = asyncio.create_task(self._run(job, queue))

    async def shut_down(self) -> None:
        """Plans no more; a plan in the making is dropped."""
        tasks = [queue.task for queue in self._queues.values() if queue.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.close()

    async def _run(self, job: Job, queue: _Queue) -> None:
        try:
            while queue.ready and job.closed is None:
                _, _, ready, choices = heapq.heappop(queue.ready)
                await self._plan(job, ready, choices)
        finally:
            del self._queues[job.job_id]

    async def _plan(self, job: Job, ready: ReadyStep, choices: Choices) -> None:
        """Plans one step. A plan for an epoch that is over is dropped."""
        outcome: Publication | str = ""
        members: Sequence[Member] = ()
        why_not: list[str] = []
        for members in choices:
            if not _is_wanted(job, ready):
                return
            try:
                outcome = await self._attempt(job, ready, members)
                break
            except PlanError as error:
                why_not.append(str(error))
        if _is_wanted(job, ready):
            why = "; ".join(dict.fromkeys(why_not)) or _no_server(job)
            self._on_planned(job, ready, members, outcome or why)

    async def _attempt(
        self, job: Job, ready: ReadyStep, members: Sequence[Member]
    ) -> Publication | str:
        """The plan, or why no servers could do it.

        Raises:
            PlanError: these cannot.
        """
        make = _maker(job, ready, members, self.planner_of(job.spec.planner))
        made = asyncio.ensure_future(self._threads.run(job.owner, make))
        try:
            if not (await asyncio.wait([made], timeout=LATE_PLAN_SECONDS))[0]:
                with contextlib.suppress(PlanError):
                    return await asyncio.to_thread(_maker(job, ready, members, _AT_HOME))
            return await made
        except PlanError:
            raise
        except ManifestError as error:
            return str(error)
        except Exception as error:
            # A mistake of ours must not leave the ranks waiting for an event that never comes.
            logger.exception("job %s: planning step %d failed", job.job_id, ready.step)
            return f"internal error of the control plane, see its log: {error!r}"
        finally:
            # A plan that comes too late is of no use, nor is the reason why there is none.
            made.add_done_callback(lambda late: late.cancelled() or late.exception())


def _maker(
    job: Job, ready: ReadyStep, members: Sequence[Member], planner: Planner
) -> Callable[[], Publication]:
    """The work of the planning thread: values only, nothing that the event loop changes."""
    job_id = job.job_id
    options = replace(job.spec.options, rank_hosts=job.leases.hosts, pipelining=job.spec.pipelining)
    spec = replace(job.spec, options=options)
    servers = planning_servers(
        members,
        spec.shape,
        job.speeds.snapshot(),
        in_place_receives=spec.placement.uses_in_place,
    )
    return lambda: publish_step(job_id, spec, ready, servers, planner)


def _is_wanted(job: Job, ready: ReadyStep) -> bool:
    return job.closed is None and ready.epoch == job.epoch and not job.is_recovering


def _no_server(job: Job) -> str:
    advice = (
        "start attention nodes, or open the job with another placement"
        if job.spec.placement.uses_pool
        else "the in-place servers of its ranks have left"
    )
    return (
        f"no attention server can serve job {job.job_id} with placement "
        f"{job.spec.placement.name}: {advice}"
    )
