"""The recoveries of jobs, from their causes to their end; see docs/fault_tolerance.md.

Part of the coordinator: lives on its event loop and changes its state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from control_plane.jobs.event_streams import EventStreams
from control_plane.jobs.job import Job
from control_plane.jobs.jobs import Jobs
from control_plane.jobs.membership import Member, Membership
from control_plane.jobs.requests import finished_event, recover_event
from control_plane.jobs.step import ReadyStep
from control_plane.metrics.metrics import Metrics
from control_plane.settings import CoordinatorSettings
from distca.contract.server_loss import ServerLoss
from distca.v1.jobs_pb2 import StepProgress

logger = logging.getLogger(__name__)


class Recoveries:
    """The recoveries of all jobs.

    Args:
        settings: times and limits.
        jobs, membership, streams, metrics: the coordinator's.
        clock: seconds that never go back.
        plan: has a step planned.
        go_on: looks at what waited for the end of a recovery.
        close: closes a job, with an error.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        jobs: Jobs,
        membership: Membership,
        streams: EventStreams,
        metrics: Metrics,
        *,
        clock: Callable[[], float],
        plan: Callable[[Job, ReadyStep], None],
        go_on: Callable[[Job], None],
        close: Callable[[Job, str], None],
    ) -> None:
        self._settings = settings
        self._jobs = jobs
        self._membership = membership
        self._streams = streams
        self._plan = plan
        self._go_on = go_on
        self._metrics = metrics
        self._clock = clock
        self._close = close
        self._leads_since = clock()

    def lead(self) -> None:
        """From now on members come to this control plane."""
        self._leads_since = self._clock()

    def server_gone(self, member: Member, what: str) -> None:
        """A pool server's lease has ended: the jobs that it still serves go on without it."""
        for job in self._jobs.open_jobs():
            step = job.step_served_by(member.server_id)
            # Plans that are made now name it no more.
            if job.spec.placement.uses_pool and step is not None and not job.is_recovering:
                self._call_for(
                    job,
                    f"server {member.server_id} {what} while serving step {step}",
                    member.server_id,
                )

    def server_reported(self, job: Job, rank: int, loss: ServerLoss) -> None:
        """A rank has lost a server. What it saw in an epoch that is over says nothing: there the
        connection may have been closed because of the recovery itself."""
        server_id = loss.server_id
        if loss.epoch < job.epoch or not job.names_server(server_id):
            logger.debug(
                "job %s: rank %d lost %s in epoch %d", job.job_id, rank, server_id, loss.epoch
            )
            return
        self._metrics.server_lost(job, server_id, loss.cause)
        member = self._membership.find(server_id)
        if member is not None and member.in_place is None:
            seconds = job.quarantine.add(server_id, now=self._clock())
            logger.warning(
                "job %s: server %s is left out for %.0f s", job.job_id, server_id, seconds
            )
        where = ""
        if member is not None and member.in_place is not None:
            where = self._membership.where_ranks_stand(job.job_id, [member.in_place.rank])
        reason = f"rank {rank} lost server {server_id}: {loss.detail}{where}"
        self._call_for(job, reason, server_id)

    def step_given_up(self, job: Job, rank: int, step: int, reason: str) -> None:
        """Ask the ranks that still run a step, which one has left unfinished, how far they are:
        they go on without its rows, or learn that they cannot."""
        # In a moment: often all ranks give it up, and then there is nothing to recover.
        asyncio.get_running_loop().call_later(
            self._settings.settle_seconds, self._recover_without, job, rank, step, reason
        )
        self.advance(job)

    def _recover_without(self, job: Job, rank: int, step: int, reason: str) -> None:
        if job.closed is None and job.others_may_run(step, rank):
            self._call_for(job, f"rank {rank} gave step {step} up: {reason}")

    def rank_left(self, job: Job, rank: int) -> None:
        """A rank has left. If it has not finished steps that others run, these may wait for its
        rows for ever: after a while, in which they may leave too, they are asked where they are."""
        if job.step_without(rank) is not None:
            asyncio.get_running_loop().call_later(
                self._settings.leave_seconds, self._go_on_without, job, rank
            )

    def rank_came_back(self, job: Job) -> None:
        """A rank has opened the job again; when all have, and servers have had the time to
        register, the control plane asks where they are."""
        if not job.leases.absent and job.is_recovering and not job.recovery.began:
            self._call_for(job, "the control plane has been away")

    def answer(self, job: Job, rank: int, epoch: int, steps: Sequence[StepProgress]) -> None:
        """Take in a rank's progress."""
        job.check_progress(steps)
        if job.recovery.answer(rank, epoch, steps):
            self.advance(job)

    def advance(self, job: Job) -> None:
        """End the recovery of ``job`` if no answer is missing any more; sends the ranks the last
        step that all have finished."""
        if job.recovery.runs and not job.recovery.missing(job.leases.joined):
            self._end(job)
        finished = job.take_finished()
        if finished is not None:
            self._streams.send_to_ranks(job, finished_event(job, finished))

    def sweep(self) -> None:
        """Acts on what has taken too long."""
        now = self._clock()
        for job in self._jobs.open_jobs():
            if job.leases.absent and now > job.return_by:
                self._close(
                    job,
                    f"ranks {sorted(job.leases.absent)} have not come back since the control plane "
                    "was away",
                )
            elif job.recovery.runs and now > job.recovery.began_at + self._settings.answer_seconds:
                missing = job.recovery.missing(job.leases.joined)
                where = self._membership.where_ranks_stand(job.job_id, missing)
                self._close(
                    job,
                    f"ranks {missing} have not said in {self._settings.answer_seconds:g} s how far "
                    f"they are; see their logs{where}",
                )

    def _call_for(self, job: Job, reason: str, server_id: str = "") -> None:
        """Has a recovery begin in a moment, in which further losses, which rarely come alone, are
        taken into the same one."""
        if not job.recovery.call_for(reason, server_id):
            return
        until = self._clock() + self._settings.settle_seconds
        if not job.recovery.began and job.is_recovering:
            until = max(until, self._leads_since + self._settings.rejoin_seconds)
        asyncio.get_running_loop().call_later(until - self._clock(), self._begin, job)

    def _go_on_without(self, job: Job, rank: int) -> None:
        step = job.step_without(rank)
        if job.closed is None and step is not None and not job.is_recovering:
            self._call_for(job, f"rank {rank} has left the job and has not finished step {step}")

    def _begin(self, job: Job) -> None:
        if job.closed is not None:
            return
        recovery = job.recovery
        job.begin_recovery(now=self._clock())
        reason = "; ".join(recovery.reasons)
        if recovery.fruitless > self._settings.max_fruitless_recoveries:
            self._close(
                job,
                f"{recovery.fruitless} recoveries in a row, and no rank has completed a tick: "
                f"{'; '.join(recovery.in_vain)}",
            )
            return
        logger.warning("job %s: recovery %d begins: %s", job.job_id, recovery.epoch, reason)
        event = recover_event(job)
        self._streams.send_to_ranks(job, event)
        if job.spec.placement.uses_pool:
            self._streams.send_to_pool(event)
        self.advance(job)

    def _end(self, job: Job) -> None:
        began_at = job.recovery.began_at
        ready = job.end_recovery()
        logger.info(
            "job %s: all ranks have answered recovery %d after %.3f s; steps %s are planned again",
            job.job_id,
            job.epoch,
            self._clock() - began_at,
            [step.step for step in ready],
        )
        for step in ready:
            self._metrics.jobs.step_ready(job, step.step)
            self._plan(job, step)
        self._go_on(job)
