"""The control plane's decisions: what each request, expired lease and finished plan changes.

Lives on one event loop. Every method runs there without waiting, so that a change of state and the
events about it are one indivisible action; only the planning of steps happens elsewhere, see
:mod:`control_plane.jobs.step_planner`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from control_plane.access.job_keys import JobKeys
from control_plane.errors import InvalidRequestError, RefusedError
from control_plane.jobs.admission import Admission, new_lease_id
from control_plane.jobs.event_streams import EventStreams, RankKey
from control_plane.jobs.isolation import IsolationDetector
from control_plane.jobs.job import Job, kept_bytes
from control_plane.jobs.jobs import Jobs
from control_plane.jobs.membership import (
    Member,
    Membership,
    ServerDescription,
    checked_id,
)
from control_plane.jobs.publication import Publication
from control_plane.jobs.rank_leases import Patience
from control_plane.jobs.recoveries import Recoveries
from control_plane.jobs.requests import (
    closed_event,
    failed_event,
    finished_event,
    hand_in_from_proto,
    opened_event,
    recover_event,
    rounds_of,
)
from control_plane.jobs.step import FailedStep, ReadyStep, StepRecord
from control_plane.jobs.step_planner import StepPlanner
from control_plane.jobs.subscriptions import Event, Subscription
from control_plane.metrics.metrics import Metrics
from control_plane.planner.planning import Planner
from control_plane.settings import CoordinatorSettings
from core_attention.manifest import RankManifest
from core_attention.plan import AT_HOME
from distca.contract.rpc_errors import Reason
from distca.contract.server_loss import ServerLoss
from distca.contract.tokens import rank_of_token
from distca.process import tracing
from distca.process.plain_text import MAX_REASON_CHARACTERS, plain
from distca.v1.jobs_pb2 import (
    HandIn,
    RankMeasurement,
    ServerMeasurement,
    StepProgress,
    StepWaiting,
)
from distca.v1.membership_pb2 import ServerLoad

logger = logging.getLogger(__name__)

LATE_SECONDS = 2.0
"""A heartbeat that comes so long after its time is late. With the default lease that is after 7 s,
when ranks give up a server that answers no ping: so of several that stop at once they meet one."""

_LEAST_PAUSE_SECONDS = 0.01
"""Before an open step is looked at again that is overdue: a part of a group has joined it."""


class Coordinator:
    """The state of the control plane and all that changes it.

    Methods refuse what cannot be with a :class:`~control_plane.errors.RefusedError`.

    Args:
        settings: leases and limits.
        planners: by the names that jobs may give.
        metrics: counts every change.
        clock: seconds that never go back.
        job_keys: derives the keys of jobs; None makes random ones.

    Attributes:
        admission: how ranks join and come back.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        planners: Mapping[str, Planner],
        metrics: Metrics,
        clock: Callable[[], float],
        job_keys: JobKeys | None = None,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._membership = Membership(lease_seconds=settings.lease_seconds)
        self._jobs = Jobs(
            lease_seconds=settings.lease_seconds,
            retained_steps=settings.retained_steps,
            max_pending_steps=settings.max_pending_steps,
            max_jobs=settings.max_jobs_per_identity,
            max_ranks=settings.max_ranks_per_identity,
            max_manifest_bytes=settings.max_manifest_bytes_per_identity,
        )
        self._streams = EventStreams(
            self._membership, metrics, max_queued_events=settings.max_queued_events
        )
        self._planner = StepPlanner(
            planners,
            default_planner=settings.default_planner,
            threads=settings.planning_threads,
            on_planned=self._planned,
        )
        self._isolation = IsolationDetector(lease_seconds=settings.lease_seconds, now=clock())
        # Jobs whose ranks have handed in something that has not been looked at.
        self._handed_in: set[str] = set()
        # Jobs whose open step is looked at again when its deadline has passed.
        self._joining: dict[str, asyncio.TimerHandle] = {}
        self._recoveries = Recoveries(
            settings,
            self._jobs,
            self._membership,
            self._streams,
            metrics,
            clock=clock,
            plan=self._plan,
            go_on=self._take_joined,
            close=self._close,
        )
        self.admission = Admission(
            self._jobs,
            self._membership,
            self._streams,
            self._planner,
            metrics,
            self._recoveries,
            job_keys or JobKeys(),
            lease_seconds=settings.lease_seconds,
            clock=clock,
            close=self._close,
            advance=self._advance,
            sweep=self._hear_and_sweep,
        )

    @property
    def settings(self) -> CoordinatorSettings:
        return self._settings

    @property
    def lease_seconds(self) -> float:
        """How long a lease runs after it was renewed."""
        return self._settings.lease_seconds

    def lead(self, generation: int) -> None:
        """From now on members come to this control plane, whose epochs and jobs are of
        ``generation``."""
        self.admission.lead(generation)
        # Whoever stands by hears nobody.
        self._isolation = IsolationDetector(lease_seconds=self.lease_seconds, now=self._clock())
        self._recoveries.lead()

    def register_server(self, description: ServerDescription, *, replace: bool = False) -> str:
        """A pool server joins; returns its lease. One of its id that does not watch is gone, and is
        replaced; one that does is replaced with ``replace`` alone.
        """
        checked_id("server_id", description.server_id)
        self._hear_and_sweep()
        holder = self._membership.find(description.server_id)
        if holder is not None and holder.in_place is None and (replace or not holder.is_watching):
            error = RefusedError(
                Reason.FENCED, f"server {holder.server_id} was started again and is replaced"
            )
            logger.warning("%s", error)
            self._membership.fence(holder, str(error))
            self._server_gone(holder, "was replaced", error)
        lease_id = new_lease_id()
        self._membership.register(description, lease_id=lease_id, now=self._clock())
        for job in self._jobs.open_jobs():
            job.quarantine.clear(description.server_id)
        logger.info(
            "server %s joined: %s at %s on %s",
            description.server_id,
            description.device,
            description.data_address,
            description.host,
        )
        self._warn_of_other_transports(description)
        self._metrics.series.registrations_total.labels("server").inc()
        self._members_changed()
        return lease_id

    def _warn_of_other_transports(self, joined: ServerDescription) -> None:
        """A pool of several transports is divided: each job uses the servers of its own."""
        others = sorted(
            f"{member.server_id} ({member.description.transport})"
            for member in self._membership.pool()
            if not member.reaches(joined.transport)
        )
        if others:
            logger.warning(
                "server %s uses the transport %s, unlike %s: a job uses the servers of its own "
                "transport alone; give all processes the same --transport",
                joined.server_id,
                joined.transport,
                ", ".join(others),
            )

    def heartbeat(self, lease_id: str, load: ServerLoad) -> Member:
        """Renews a server's lease."""
        self._hear()
        now = self._clock()
        member = self._membership.heartbeat(lease_id, load, now=now)
        if member.in_place is None and load.oldest_ready_seconds > self._settings.stall_seconds:
            raise self._fence(member)
        self._metrics.servers.heartbeat(member)
        if member.in_place is not None:
            self._jobs.get(member.in_place.job_id).leases.renew(lease_id, now=now)
        return member

    def drain(self, server_id: str) -> None:
        """Stops giving new work to a server."""
        self._membership.drain(server_id)
        logger.info("server %s drains", server_id)
        self._members_changed()

    def check_server_lease(self, server_id: str, lease_id: str) -> None:
        """Raises unless ``lease_id`` is the lease of server ``server_id``."""
        member = self._membership.of_lease(lease_id, now=self._clock())
        if member.server_id != server_id:
            raise RefusedError(
                Reason.WRONG_TOKEN,
                f"a call about server {server_id!r} came with the lease of {member.server_id}",
            )

    def deregister(self, lease_id: str) -> None:
        """A pool server leaves. If it has not finished its steps, others take them over."""
        member = self._membership.deregister(lease_id, now=self._clock())
        logger.info("server %s left", member.server_id)
        self._server_gone(member, "left")

    def report_rank_lost(self, lease_id: str, job_id: str, rank: int) -> None:
        """A server's connection to a rank was reset. The job need not be known yet: the control
        plane may have started again."""
        self._membership.rank_lost(lease_id, job_id, rank, now=self._clock())

    def servers(self) -> list[tuple[Member, float]]:
        """The live servers by id, each with the seconds since its heartbeat."""
        now = self._clock()
        return [(member, now - member.renewed_at) for member in self._membership.members()]

    def pool_transports(self) -> list[str]:
        """The transports of pool servers that take new work, sorted, each once."""
        return self._membership.pool_transports()

    def jobs(self) -> list[Job]:
        """The open jobs."""
        return self._jobs.open_jobs()

    def check_token(self, job_id: str, token: bytes | None, owner: str, lease_id: str = "") -> None:
        """Raises unless ``token`` is one that ``owner`` was given for the job, and, if
        ``lease_id`` is a rank's, for that rank.
        """
        job = self._jobs.get(job_id)
        if token is None:
            raise RefusedError(
                Reason.MISSING_TOKEN,
                f"the call is about job {job_id} and carries no token; send the one that OpenJob "
                "gave",
            )
        rank = rank_of_token(job.key, token)
        if rank is None or owner != job.owner:
            raise RefusedError(
                Reason.WRONG_TOKEN, f"the token that came is none of {owner!r} for job {job_id}"
            )
        if job.leases.rank_of(lease_id) not in (None, rank):
            raise RefusedError(
                Reason.WRONG_TOKEN,
                f"the token of rank {rank} of job {job_id} came with another rank's lease",
            )

    def renew_rank(
        self,
        job_id: str,
        lease_id: str,
        *,
        next_step: int = 0,
        sent_ticks: Sequence[int] = (),
        in_place_load: ServerLoad | None = None,
    ) -> None:
        """Renews the lease of a rank and of its in-place server, and takes its load. Steps before
        ``next_step`` of which the rank has handed in nothing get no plan any more; of that one it
        has sent ``sent_ticks``, if it has begun."""
        self._hear()
        now = self._clock()
        job = self._jobs.get(job_id)
        job.leases.renew(lease_id, now=now)
        member = self._membership.renew_in_place(lease_id, now=now, load=in_place_load)
        if member is not None and in_place_load is not None:
            self._metrics.servers.heartbeat(member)
        if sent_ticks:
            job.has_sent(lease_id, next_step, sent_ticks)
        if job.went_on(lease_id, next_step):
            self._advance(job)

    def leave_job(self, job_id: str, lease_id: str, error: str) -> None:
        """A rank leaves; with an error, or as the last one, it closes the job."""
        job = self._jobs.get(job_id)
        rank = job.leave(lease_id, error=error, now=self._clock())
        logger.info("job %s: rank %d left", job_id, rank)
        if job.closed is not None:
            self._close(job, job.closed)
            return
        self._streams.end_rank(job, rank)
        self._membership.remove_in_place(job_id, rank)
        self._members_changed()
        self._metrics.ranks_changed(self._jobs.open_jobs())
        self._advance(job)
        self._recoveries.rank_left(job, rank)

    def manifest_bytes(self, owner: str) -> int:
        """The bytes of the manifests that are kept for the jobs of ``owner``."""
        return self._jobs.manifest_bytes(owner)

    def submit_manifest(
        self,
        job_id: str,
        lease_id: str,
        manifest: RankManifest,
        *,
        forward_only: bool,
    ) -> None:
        """Takes in a manifest, and has the step planned once all ranks' are there."""
        job = self._jobs.get(job_id)
        self._jobs.make_room(job.owner, kept_bytes(manifest))
        job.submit(lease_id, manifest, forward_only=forward_only, now=self._clock())
        self._metrics.jobs.manifest_received(job)
        self._advance_soon(job)

    def join_step(
        self, job_id: str, lease_id: str, message: HandIn, manifest: RankManifest | None
    ) -> None:
        """A rank hands in a step that has no number, says that its forward begins, or hands it in
        again, with the number that it has got."""
        job, now = self._jobs.get(job_id), self._clock()
        rank = job.leases.get(lease_id, now=now).rank
        joining = message.joining
        hand_in = None if manifest is None else hand_in_from_proto(message, manifest, now)
        in_round, closed_rounds = rounds_of(joining)
        if closed_rounds is not None:
            job.open_step.closes(rank, closed_rounds)
        if hand_in is None:
            job.open_step.begins(rank, joining.sequence, in_round, now)
        else:
            self._jobs.make_room(job.owner, kept_bytes(hand_in.manifest))
            if joining.numbered:
                job.hand_in_again(lease_id, hand_in)
            else:
                job.join_step(lease_id, hand_in)
            self._metrics.jobs.manifest_received(job)
        self._advance_soon(job)

    def watch_rank(self, job_id: str, lease_id: str) -> tuple[RankKey, Subscription]:
        """The events of a job for a rank: the job, a recovery that waits for it, the unfinished
        steps, then what comes."""
        job = self._jobs.get(job_id)
        rank = job.leases.get(lease_id, now=self._clock()).rank
        serves = any(
            member.in_place is not None and member.in_place.rank == rank
            for member in self._membership.in_place_of(job_id)
        )
        first: list[Event] = [opened_event(job, to_server=serves)]
        if job.finished_step >= 0:
            first.append(finished_event(job, job.finished_step))
        if job.recovery.runs and not job.recovery.has_answered(rank):
            first.append(recover_event(job))
        first += [partial(record.rank_event, rank) for record in job.steps_to_tell()]
        job.leases.watched_by(rank)
        return self._streams.watch_rank(job, rank, first)

    def watch_server(self, lease_id: str) -> tuple[str, Subscription]:
        """The events for a pool server: the jobs that use the pool, with their epochs, their
        unfinished steps that name it, then what comes.
        """
        member = self._membership.of_lease(lease_id, now=self._clock())
        if member.in_place is not None:
            raise InvalidRequestError(
                f"server {member.server_id} is in-place on rank {member.in_place.rank}; its plans "
                "are part of what WatchRank gives that rank"
            )
        first: list[Event] = []
        for job in self._pool_jobs():
            first.append(opened_event(job, to_server=True))
            if job.recovery.began:
                first.append(recover_event(job))
            first += [
                partial(record.server_event, member.server_id)
                for record in job.steps_to_tell()
                if member.server_id in record.serving
            ]
        watched = self._streams.watch_server(member, first)
        member.is_watching = True
        return watched

    def unwatch(self, key: RankKey | str, subscription: Subscription) -> None:
        """The reader of a stream has gone."""
        if not self._streams.discard(key, subscription):
            return
        if isinstance(key, str):
            self._membership.stream_broken(key)
        else:
            self._jobs.stream_broken(*key, now=self._clock())

    def report_rank(self, job_id: str, lease_id: str, step: int, measured: RankMeasurement) -> None:
        """Takes in what a rank measured."""
        job = self._jobs.get(job_id)
        if job.report_rank(lease_id, step, measured, now=self._clock()):
            self._metrics.jobs.rank_reported(job, job.step(step))
        self._recoveries.advance(job)

    def give_up_step(self, job_id: str, lease_id: str, step: int, reason: str) -> None:
        """A rank leaves ``step`` before it is complete."""
        job = self._jobs.get(job_id)
        rank = job.give_up(lease_id, step, reason, now=self._clock())
        self._recoveries.step_given_up(job, rank, step, reason)

    def wait_in_step(self, job_id: str, lease_id: str, step: int, wait: StepWaiting) -> None:
        """A rank has waited long for a tick. If another one that it needs runs its nano-batches in
        another order, the step fails."""
        job = self._jobs.get(job_id)
        orders = job.wait(lease_id, step, wait, now=self._clock())
        if orders:
            self._fail(
                job,
                step,
                f"{orders}; all ranks must run forward and backward of nano-batches in one order",
            )

    def report_server(
        self, job_id: str, lease_id: str, step: int, measured: ServerMeasurement
    ) -> None:
        """Takes in what a server measured."""
        job = self._jobs.get(job_id)
        member = self._membership.of_lease(lease_id, now=self._clock())
        if member.server_id != measured.server_id:
            raise InvalidRequestError(
                f"a measurement of server {measured.server_id!r} came with the lease of server "
                f"{member.server_id}"
            )
        if job.report_server(step, measured):
            self._metrics.server_reported(job, job.step(step), measured.server_id)

    def report_server_lost(self, job_id: str, lease_id: str, loss: ServerLoss) -> None:
        """A rank has lost a server."""
        job = self._jobs.get(job_id)
        rank = job.leases.get(lease_id, now=self._clock()).rank
        self._recoveries.server_reported(job, rank, loss)

    def report_progress(
        self, job_id: str, lease_id: str, epoch: int, steps: Sequence[StepProgress]
    ) -> None:
        """A rank answers the recovery of ``epoch``."""
        job = self._jobs.get(job_id)
        rank = job.leases.get(lease_id, now=self._clock()).rank
        self._recoveries.answer(job, rank, epoch, steps)

    def job(self, job_id: str) -> Job:
        """The open job ``job_id``."""
        return self._jobs.get(job_id)

    def sweep(self) -> None:
        """Act on the leases that have run out; on none while no member calls at all."""
        now = self._clock()
        if self._isolation.is_isolated(self._n_leases, now=now):
            return
        for member in self._membership.expire(now=now):
            logger.warning("server %s lost its lease", member.server_id)
            self._metrics.lease_expired("server")
            self._metrics.series.failures_detected_total.labels("lease_expired").inc()
            why = RefusedError(
                Reason.FENCED,
                f"server {member.server_id} sent no heartbeat for {self.lease_seconds:g} s",
            )
            self._server_gone(member, "lost its lease", why)
        for job in self._jobs.open_jobs():
            lost = self._membership.lost_ranks(job.job_id)
            gone = job.leases.gone(self._patience(lost), now=now)
            if gone:
                for _ in gone:
                    self._metrics.lease_expired("rank")
                names = ", ".join(
                    f"rank {lease.rank} on {lease.host} for {now - lease.heard_at:.0f} s"
                    for lease in gone
                )
                self._close(job, f"no sign of life from {names}; see its log")
                continue
            absent = sorted(job.leases.absent & lost.keys())
            if absent and now - job.reopened_at > self._settings.lost_rank_seconds:
                self._close(
                    job,
                    f"ranks {absent} have not come back since the control plane was away, and "
                    "servers have lost their connections to them; see their logs",
                )
        self._recoveries.sweep()

    def _patience(self, lost: Mapping[int, float]) -> Patience:
        """With ranks whose stream has broken, of which servers have lost ``lost``. If all streams
        have broken, it is rather this process's network."""
        if not self._streams.is_watched:
            return Patience()
        return Patience(
            broken_seconds=self._settings.broken_stream_seconds,
            lost_seconds=self._settings.lost_rank_seconds,
            lost=lost,
        )

    @property
    def _n_leases(self) -> int:
        servers = sum(member.in_place is None for member in self._membership.members())
        return servers + sum(len(job.leases.joined) for job in self._jobs.open_jobs())

    def _hear(self) -> None:
        """Note a call. If no member could call for a while, all leases begin again: the others have
        as much time to call as they would have had."""
        now = self._clock()
        silent_seconds = self._isolation.heard(now=now)
        # Where there was nobody to be heard, as before the first member, there is nothing to tell.
        if silent_seconds and self._n_leases:
            logger.warning("nobody was heard for %.1f s; all leases begin anew", silent_seconds)
            self._membership.renew_all(now=now)
            for job in self._jobs.open_jobs():
                job.leases.renew_all(now=now)

    def _hear_and_sweep(self) -> None:
        self._hear()
        self.sweep()

    async def shut_down(self) -> None:
        """Ends every stream and stops planning; jobs are not closed, members may find a successor
        of this process."""
        self._streams.end_all(
            RefusedError(Reason.SHUTTING_DOWN, "the control plane is shutting down")
        )
        await self._planner.shut_down()

    def _plan(self, job: Job, ready: ReadyStep) -> None:
        """Has a step planned with the servers that are there now."""
        self._planner.add(job, ready, self._choices_of(job, begun=ready.begun))

    def _planned(
        self,
        job: Job,
        ready: ReadyStep,
        members: Sequence[Member],
        outcome: Publication | str,
    ) -> None:
        """Publishes the plan of a step, or has it made again if one of its servers has gone. A step
        that cannot be planned may be submitted again; ranks may wait in the middle of it."""
        if not isinstance(outcome, Publication):
            begun = "the step has begun and cannot be planned again: " if ready.begun else ""
            self._fail(job, ready.step, begun + outcome)
        elif self._still_serve(members, outcome.record.serving):
            self._publish(job, outcome)
        else:
            logger.info("job %s: a server of step %d left; planning again", job.job_id, ready.step)
            self._plan(job, ready)

    def _choices_of(self, job: Job, *, begun: bool) -> list[list[Member]]:
        """The servers of a job's next plan, pool servers by id, then in-place ones by rank; and
        those to take instead if these cannot do it.

        Pool servers whose heartbeat is late are left out if others can do it: they may be stopped,
        and ranks that connect to them find that out by waiting. A job on the pool falls back on its
        ranks' own servers, if all have one, and then on pool servers that its ranks could not reach
        of late. ``begun``: ranks stand still in the step.
        """
        pool = self._membership.pool() if job.spec.placement.uses_pool else []
        pool = [member for member in pool if member.reaches(job.spec.transport)]
        own = self._membership.in_place_of(job.job_id)
        now = self._clock()
        near = [
            m for m in pool if not job.quarantine.holds(m.server_id, heard_at=m.renewed_at, now=now)
        ]
        late_seconds = self.lease_seconds / 3 + LATE_SECONDS
        prompt = [m for m in near if now - m.renewed_at <= late_seconds]
        if job.spec.placement.uses_in_place:
            choices = [prompt + own, near + own]
        else:
            home = own if len(own) == job.spec.n_ranks else []
            # If all are late it may be this process that is slow; who stands still risks nothing.
            choices = [prompt, home, near, pool] if begun else [prompt, near, home, pool]
        return [members for members in choices if members]

    def _still_serve(self, members: Sequence[Member], serving: frozenset[str]) -> bool:
        """Return whether those of ``members`` that are in ``serving`` may still be given work. A
        draining in-place server may: its own rank's."""
        return all(
            self._membership.is_live(member)
            and (member.in_place is not None or not member.draining)
            for member in members
            if member.server_id in serving
        )

    def _publish(self, job: Job, publication: Publication) -> None:
        """Store a planned step and send it to the job's ranks and the step's servers."""
        record, planned_at = publication.record, time.monotonic()
        try:
            more = job.more_bytes(record.step, publication.plan_bytes)
            self._jobs.make_room(job.owner, more)
        except RefusedError as error:
            self._fail(job, record.step, str(error))
            return
        job.keeps(record.step, more)
        replanned = job.planned(record)
        if replanned:
            self._metrics.jobs.step_replanned(job, record.plan.epoch)
        _log_where(job, record)
        for rank, event in publication.by_rank.items():
            self._streams.send_to_rank(job, rank, event)
        for member in self._membership.pool():
            if member.server_id in publication.by_server:
                self._streams.send_to_server(member, publication.by_server[member.server_id])
        self._metrics.jobs.step_planned(job, publication)
        _trace(job, record, planned_at, replanned=replanned)
        logger.debug("job %s: step %d planned: %s", job.job_id, record.step, record.plan.reason)

    def _fail(self, job: Job, step: int, error: str) -> None:
        logger.warning("job %s: step %d has no plan: %s", job.job_id, step, error)
        sequences = job.failed(step)
        self._metrics.jobs.plan_failed(job, step)
        for rank in job.known_ranks:
            event = failed_event(job, step, error, sequence=sequences.get(rank, 0))
            self._streams.send_to_rank(job, rank, event)

    def _pool_jobs(self) -> list[Job]:
        return [job for job in self._jobs.open_jobs() if job.spec.placement.uses_pool]

    def _advance_soon(self, job: Job) -> None:
        """As :meth:`_advance`, once for all hand-ins that have come by now: many come at a time."""
        if job.job_id not in self._handed_in:
            self._handed_in.add(job.job_id)
            asyncio.get_running_loop().call_soon(self._advance_now, job)

    def _advance_now(self, job: Job) -> None:
        self._handed_in.discard(job.job_id)
        if job.closed is None:
            self._advance(job)

    def _advance(self, job: Job) -> None:
        """Has the decided steps of ``job`` planned or reported as failed."""
        for outcome in job.take_decided():
            if isinstance(outcome, FailedStep):
                self._fail(job, outcome.step, outcome.error)
            else:
                self._metrics.jobs.step_ready(job, outcome.step)
                self._plan(job, outcome)
        self._recoveries.advance(job)
        self._take_joined(job)

    def _take_joined(self, job: Job) -> None:
        """Has the open step of ``job`` planned, and those after it, as far as ranks have joined."""
        now = self._clock()
        while job.closed is None and (outcome := job.take_joined(now=now)) is not None:
            if isinstance(outcome, FailedStep):
                self._fail(job, outcome.step, outcome.error)
            else:
                self._metrics.jobs.step_ready(job, outcome.step)
                self._metrics.jobs.step_joined(job, outcome)
                self._plan(job, outcome)
            if (timer := self._joining.pop(job.job_id, None)) is not None:
                # Of that step: the next one may have to be planned before.
                timer.cancel()
        if job.job_id not in self._joining and (deadline := job.open_step.deadline()) is not None:
            pause = max(deadline - now, _LEAST_PAUSE_SECONDS)
            self._joining[job.job_id] = asyncio.get_running_loop().call_later(
                pause, self._join_ends, job
            )

    def _join_ends(self, job: Job) -> None:
        self._joining.pop(job.job_id, None)
        if job.closed is None:
            self._take_joined(job)

    def _fence(self, member: Member) -> RefusedError:
        """Take the lease of a server that lives and does no work; returns the error for it."""
        load = member.load
        error = RefusedError(
            Reason.FENCED,
            f"server {member.server_id} has had {load.queued_tasks} tasks ready and has finished "
            f"none for {load.oldest_ready_seconds:.1f} s, and its lease was taken away; it may "
            "register again",
        )
        logger.warning("%s", error)
        self._membership.fence(member, str(error))
        self._metrics.series.failures_detected_total.labels("no_progress").inc()
        self._metrics.series.servers_fenced_total.inc()
        self._server_gone(member, "finished no work", error)
        return error

    def _server_gone(self, member: Member, what: str, error: RefusedError | None = None) -> None:
        """A pool server is no member any more."""
        self._streams.end_server(member, error)
        self._recoveries.server_gone(member, what)
        self._members_changed()

    def _close(self, job: Job, error: str) -> None:
        """Close ``job`` and inform its members."""
        error = plain(error, MAX_REASON_CHARACTERS)
        if error:
            logger.warning("job %s closed: %s", job.job_id, error)
        else:
            logger.info("job %s closed: every rank has finished", job.job_id)
        self._jobs.close(job, error)
        event = closed_event(job)
        for rank in job.known_ranks:
            self._streams.send_to_rank(job, rank, event)
            self._streams.end_rank(job, rank)
        if job.spec.placement.uses_pool:
            self._streams.send_to_pool(event)
        self._membership.remove_in_place(job.job_id)
        if self._jobs.named(job.spec.name) is None:
            self._metrics.job_closed(job)
        self._members_changed()
        self._metrics.ranks_changed(self._jobs.open_jobs())

    def _members_changed(self) -> None:
        self._metrics.members_changed(self._membership.members())


def _log_where(job: Job, record: StepRecord) -> None:
    """Logs when steps begin to leave documents at home, and why, and when no more."""
    why = ""
    if record.plan.planner == AT_HOME:
        why = record.plan.reason
    elif not job.spec.placement.uses_in_place and all(
        server.in_place_rank is not None for server in record.plan.servers
    ):
        why = "no pool server can serve it"
    if why != job.why_at_home:
        job.why_at_home = why
        if why:
            logger.warning("job %s: at home from step %d on: %s", job.job_id, record.step, why)
        else:
            logger.info("job %s: planned again from step %d on", job.job_id, record.step)


def _trace(job: Job, record: StepRecord, planned_at: float, *, replanned: bool) -> None:
    """Records how a step was planned and published, the root of the step's trace."""
    tracing.record(
        "distca.plan",
        job.job_id,
        record.step,
        began_at=planned_at - record.plan_seconds,
        ended_at=planned_at,
        root=not replanned,
        epoch=record.plan.epoch,
        planner=record.plan.planner,
        reason=record.plan.reason,
    )
    tracing.record(
        "distca.publish", job.job_id, record.step, began_at=planned_at, ended_at=time.monotonic()
    )
