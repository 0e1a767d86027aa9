"""Ranks that join their jobs, and that come back to them.

Part of the coordinator: lives on its event loop and changes its state.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import Any

from control_plane.access.job_keys import JobKeys
from control_plane.errors import InvalidRequestError, RefusedError
from control_plane.jobs.event_streams import EventStreams
from control_plane.jobs.job import Job
from control_plane.jobs.job_ids import is_later, name_of, new_job_id
from control_plane.jobs.job_spec import JobSpec
from control_plane.jobs.jobs import Jobs
from control_plane.jobs.membership import (
    MAX_HOST_CHARACTERS,
    InPlace,
    Membership,
    ServerDescription,
    checked_text,
)
from control_plane.jobs.recoveries import Recoveries
from control_plane.jobs.requests import opened_event
from control_plane.jobs.same_documents import Group, check_group
from control_plane.jobs.step_planner import StepPlanner
from control_plane.leadership.epochs import first_epoch
from control_plane.metrics.metrics import Metrics
from distca.contract.rpc_errors import Reason

logger = logging.getLogger(__name__)

MAX_EPOCH = 2**62
"""Generations are seconds, and leave room for ages; nothing that counts is as high."""


class Admission:
    """Opens jobs.

    Args:
        jobs, membership, streams, planner, metrics, recoveries: the coordinator's.
        job_keys: derives the keys of jobs.
        lease_seconds: of ranks.
        clock: seconds that never go back.
        close: closes a job, for a reason that its members learn.
        advance: plans the steps of a job that are decided, and reports those that failed.
        sweep: acts on leases that have run out.

    Attributes:
        first_epoch: of jobs that are opened.
    """

    def __init__(
        self,
        jobs: Jobs,
        membership: Membership,
        streams: EventStreams,
        planner: StepPlanner,
        metrics: Metrics,
        recoveries: Recoveries,
        job_keys: JobKeys,
        *,
        lease_seconds: float,
        clock: Callable[[], float],
        close: Callable[[Job, str], None],
        advance: Callable[[Job], None],
        sweep: Callable[[], None],
    ) -> None:
        self.first_epoch = 0
        self._n_created = 0
        self._led_since = 0.0
        self._jobs = jobs
        self._membership = membership
        self._streams = streams
        self._planner = planner
        self._metrics = metrics
        self._recoveries = recoveries
        self._job_keys = job_keys
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._close = close
        self._advance = advance
        self._sweep = sweep

    def lead(self, generation: int) -> None:
        """From now on members come to this control plane, whose epochs and jobs are of
        ``generation``, see :mod:`control_plane.leadership.epochs`."""
        self.first_epoch = first_epoch(generation)
        self._n_created = 0
        self._led_since = self._clock()

    def open(
        self,
        spec: JobSpec,
        rank: int,
        host: str,
        in_place: ServerDescription | None,
        *,
        group: Group = (),
        owner: str = "",
        replace: bool = False,
    ) -> tuple[Job, str]:
        """A rank joins a job, the first one creates it; returns the job and the rank's lease.

        Args:
            group: the ranks of its tensor-parallel group, itself among them.
            replace: it ends a job of the name in which it has no place.
        """
        self._sweep()
        self._check_open(spec, rank, host, group)
        job = self._joinable(spec, rank, owner, replace=replace)
        if job is None:
            self._jobs.check_room(spec, owner)
            self._check_transport(spec)
        else:
            self._membership.remove_in_place(job.job_id, rank)
        if in_place is not None:
            self._membership.check_free(in_place.server_id)
        if job is None:
            self._n_created += 1
            job_id = new_job_id(spec.name, self.first_epoch + self._n_created)
            job = self._make_job(spec, job_id, self._job_keys.key_of(job_id, owner), owner)
        try:
            lease_id = self._enter(job, job.join, rank, host, in_place, group)
        except RefusedError as error:
            self._refuse(job, rank, error)
            raise
        logger.info("job %s: rank %d joined from %s", job.job_id, rank, host)
        return job, lease_id

    def _enter(
        self,
        job: Job,
        enter: Callable[..., None],
        rank: int,
        host: str,
        in_place: ServerDescription | None,
        group: Group,
    ) -> str:
        """Gives a rank and its server a lease of ``job``, which it enters so; returns the lease."""
        now, lease_id = self._clock(), new_lease_id()
        enter(rank, host=host, lease_id=lease_id, now=now, group=group)
        if in_place is not None:
            place = InPlace(job.job_id, rank)
            self._membership.register_in_place(in_place, place, lease_id=lease_id, now=now)
        self._metrics.series.registrations_total.labels("rank").inc()
        self._metrics.members_changed(self._membership.members())
        self._metrics.ranks_changed(self._jobs.open_jobs())
        return lease_id

    def _joinable(self, spec: JobSpec, rank: int, owner: str, *, replace: bool) -> Job | None:
        """The open job that ``rank`` joins; None if it creates one, for which one of the name ends
        that is over or is to be replaced."""
        job = self._jobs.named(spec.name)
        if job is None:
            return None
        if job.owner != owner:
            raise RefusedError(
                Reason.OTHER_OWNER,
                f"rank {rank} of {owner!r} opens job {spec.name}, which another identity runs; "
                "choose another name",
            )
        try:
            if job.has_place_for(spec, rank, replace=replace):
                return job
        except RefusedError as error:
            self._refuse(job, rank, error)
            raise
        if rank not in job.leases.left:
            self._close(job, f"rank {rank} was started again")
        return None

    def resume(
        self,
        spec: JobSpec,
        rank: int,
        host: str,
        in_place: ServerDescription | None,
        *,
        job_id: str,
        epoch: int,
        token: bytes | None,
        group: Group = (),
        owner: str = "",
    ) -> tuple[Job, str]:
        """A rank comes back to its job: because the control plane has started again, which then
        knows the job from now on, or because the rank lost its lease. Returns as :meth:`open`.

        Args:
            job_id: of the job.
            epoch: the highest that the rank has seen.
            token: shows that it is the rank.
            group: as for :meth:`open`.
        """
        self._sweep()
        self._check_open(spec, rank, host, group)
        if epoch >= MAX_EPOCH:
            raise InvalidRequestError(f"resume.epoch is {epoch}; epochs are below {MAX_EPOCH}")
        key = self._job_keys.proved(job_id, owner=owner, rank=rank, token=token)
        if name_of(job_id) != spec.name:
            raise InvalidRequestError(f"job {job_id} is none of the name {spec.name}")
        job = self._jobs.find(job_id, spec)
        if job is None:
            self._jobs.check_room(spec, owner)
            self._free_name(job_id, spec.name, owner)
            now = self._clock()
            job = self._make_job(
                spec,
                job_id,
                key,
                owner,
                # All its ranks are to come back.
                absent=frozenset(range(spec.n_ranks)),
                reopened_at=now,
                return_by=now + self._lease_seconds,
            )
        self._membership.remove_in_place(job_id, rank)
        if in_place is not None:
            self._membership.check_free(in_place.server_id)
        lease_id = self._enter(job, job.come_back, rank, host, in_place, group)
        job.recovery.raise_epoch(epoch)
        logger.info("job %s: rank %d came back from %s", job_id, rank, host)
        self._recoveries.rank_came_back(job)
        return job, lease_id

    def _refuse(self, job: Job | None, rank: int, error: RefusedError) -> None:
        """Those who wait for ``rank`` in ``job`` learn that its settings keep it away."""
        if job is None or error.reason is not Reason.SPEC_MISMATCH:
            return
        logger.warning("job %s: rank %d is refused: %s", job.job_id, rank, error)
        job.refused(rank, str(error))
        self._advance(job)

    def _check_open(self, spec: JobSpec, rank: int, host: str, group: Group) -> None:
        self._planner.planner_of(spec.planner)
        if not 0 <= rank < spec.n_ranks:
            raise InvalidRequestError(
                f"rank is {rank}; job {spec.name} has ranks 0 to {spec.n_ranks - 1}"
            )
        checked_text(f"job {spec.name}, rank {rank}: host", host, longest=MAX_HOST_CHARACTERS)
        check_group(rank, group, spec.n_ranks)

    def _check_transport(self, spec: JobSpec) -> None:
        pool = self._membership.pool() if spec.placement.uses_pool else []
        if pool and not any(member.reaches(spec.transport) for member in pool):
            theirs = " and ".join(self._membership.pool_transports())
            raise RefusedError(
                Reason.SPEC_MISMATCH,
                f"job {spec.name} uses transport {spec.transport}, the pool's servers {theirs}: "
                f"give the ranks --transport={theirs} (SessionOptions.transport), or the nodes "
                f"--transport={spec.transport}",
            )

    def _make_job(self, spec: JobSpec, job_id: str, key: bytes, owner: str, **reopened: Any) -> Job:
        """A new job, or one from before this control plane."""
        job = self._jobs.create(
            spec, job_id=job_id, key=key, owner=owner, first_epoch=self.first_epoch, **reopened
        )
        logger.info("job %s opened%s: %s", job_id, " again" if reopened else "", spec)
        self._metrics.job_opened(spec)
        if spec.placement.uses_pool:
            self._streams.send_to_pool(opened_event(job, to_server=True))
        return job

    def _free_name(self, job_id: str, name: str, owner: str) -> None:
        """Closes the job that has the name of the job ``job_id``, which comes back. Of two the one
        that was opened later stays; but another identity does not get a name by asking for it
        while jobs from before may yet come back.
        """
        other = self._jobs.named(name)
        if other is None:
            return
        comes_back = self._clock() < self._led_since + 2 * self._lease_seconds
        is_newcomer = comes_back and other.owner != owner and not other.is_resumed
        if is_later(other.job_id, job_id) and not is_newcomer:
            raise RefusedError(
                Reason.ALREADY_EXISTS,
                f"job {job_id} is not known any more, and {other.job_id} has taken its name",
            )
        self._close(
            other,
            f"its name {name} is that of another job, whose ranks have come back; open it under "
            "another name",
        )


def new_lease_id() -> str:
    """Names a lease; nobody can guess it."""
    return secrets.token_hex(16)
