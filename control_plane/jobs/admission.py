"""Ranks that join their jobs, and that come back to them.

Part of the coordinator: lives on its event loop and changes its state.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable

from control_plane.access.job_keys import JobKeys
from control_plane.errors import (
    AlreadyExistsError,
    HeldError,
    InvalidRequestError,
    SpecMismatchError,
)
from control_plane.jobs.event_streams import EventStreams
from control_plane.jobs.holders import retry_seconds
from control_plane.jobs.job import Job
from control_plane.jobs.job_ids import is_later, name_of, new_job_id, successor_of
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
from control_plane.jobs.step_planner import StepPlanner
from control_plane.jobs.tensor_parallel import Group, check_group
from control_plane.leadership.epochs import first_epoch
from control_plane.metrics.metrics import Metrics
from distca.contract.timeouts import default_seconds

logger = logging.getLogger(__name__)

MAX_EPOCH = 2**62
"""Generations are seconds, and leave room for ages; nothing that counts is as high."""

MAX_HELD_SECONDS = default_seconds("held_name_seconds")
"""Jobs come back within seconds, however long a lease; who opens a new one waits 45 s at most."""


class Admission:
    """Opens jobs.

    Args:
        jobs, membership, streams, planner, metrics, recoveries: the coordinator's.
        job_keys: derives the keys of jobs.
        lease_seconds: of ranks.
        clock: seconds that never go back.
        close: closes a job and tells all who know it why.
        advance: plans the steps of a job that are decided, and tells of those that failed.
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
        self._names_held_until = -math.inf
        # By name, the latest that has come back: its id, and whose it is.
        self._came_back: dict[str, tuple[str, str]] = {}
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

    def lead(self, generation: int, *, hold_names: bool) -> None:
        """From now on members come to this control plane.

        Args:
            generation: of its epochs and its jobs, see :mod:`control_plane.leadership.epochs`.
            hold_names: jobs from before may come back: for two leases, but at most
                :data:`MAX_HELD_SECONDS`, names that no job has are kept for theirs, so that no
                other tenant takes them meanwhile. Whose job has come back and ended need not
                wait; should a later job of the name come back, it is that one's.
        """
        self.first_epoch = first_epoch(generation)
        self._n_created = 0
        self._came_back.clear()
        if hold_names:
            held_seconds = min(2 * self._lease_seconds, MAX_HELD_SECONDS)
            self._names_held_until = self._clock() + held_seconds

    def open(
        self,
        spec: JobSpec,
        rank: int,
        host: str,
        in_place: ServerDescription | None,
        *,
        group: Group = (),
        owner: str = "",
        waited_seconds: float = 0.0,
    ) -> tuple[Job, str]:
        """A rank joins a job, the first one creates it; returns the job and the rank's lease.

        Args:
            group: the ranks of its tensor-parallel group, itself among them.

        Raises:
            InvalidRequestError: the planner or the rank does not exist, the host is empty, or the
                group cannot be.
            HeldError: the name is one whose holder may be gone, or may yet come back: ask again,
                with ``waited_seconds`` since the first time.
            QuotaError: as :meth:`Jobs.check_room`.
            OtherOwnerError, SpecMismatchError, AlreadyExistsError: as :meth:`Jobs.joinable`
                and :meth:`Membership.check_free`. SpecMismatchError, too, if the pool has servers,
                but none of the job's transport, or others have said otherwise of the group.
        """
        self._sweep()
        self._check_open(spec, rank, host, group)
        now, lease_id = self._clock(), new_lease_id()
        try:
            job = self._jobs.joinable(
                spec, rank, owner=owner, waited_seconds=waited_seconds, now=now
            )
            if in_place is not None:
                self._membership.check_free(
                    in_place.server_id, now=now, waited_seconds=waited_seconds
                )
            new_id = "" if job is not None else self._new_id(spec, owner, now)
        except HeldError as error:
            if not waited_seconds:
                logger.info("job %s: rank %d on %s waits: %s", spec.name, rank, host, error)
            raise
        except SpecMismatchError as error:
            self._refuse(self._jobs.named(spec.name), rank, error)
            raise
        if job is None:
            self._jobs.check_room(spec, owner)
            self._check_transport(spec)
            job = self._create_job(spec, owner, new_id)
        try:
            job.join(rank, host=host, lease_id=lease_id, now=now, group=group)
        except SpecMismatchError as error:
            self._refuse(job, rank, error)
            raise
        if in_place is not None:
            self._membership.register_in_place(
                in_place, InPlace(job.job_id, rank), lease_id=lease_id, now=now
            )
            self._members_changed()
        logger.info("job %s: rank %d joined from %s", job.job_id, rank, host)
        self._metrics.registered("rank")
        self._metrics.ranks_changed(self._jobs.open_jobs())
        return job, lease_id

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

        Raises:
            InvalidRequestError: the planner or the rank does not exist, the host is empty, or the
                group cannot be.
            MissingTokenError, WrongTokenError: the token is missing, or not the rank's.
            UnknownJobError, SpecMismatchError: as :meth:`Jobs.find`. SpecMismatchError, too, if
                others have said otherwise of the group.
            QuotaError: as :meth:`Jobs.check_room`.
            AlreadyExistsError: another job has the name, the rank has left, or another live
                server has the in-place server's id.
        """
        self._sweep()
        self._check_open(spec, rank, host, group)
        if epoch >= MAX_EPOCH:
            raise InvalidRequestError(f"resume.epoch is {epoch}; epochs are below {MAX_EPOCH}")
        key = self._job_keys.proved(job_id, owner=owner, rank=rank, token=token)
        if name_of(job_id) != spec.name:
            raise InvalidRequestError(f"job {job_id} is none of the name {spec.name}")
        job = self._jobs.find(job_id, spec)
        now, lease_id = self._clock(), new_lease_id()
        if job is None:
            self._jobs.check_room(spec, owner)
            self._free_name(job_id, spec.name)
            job = self._reopen_job(spec, job_id, key, owner)
        self._membership.remove_in_place(job_id, rank)
        if in_place is not None:
            self._membership.check_free(in_place.server_id, now=now)
        job.come_back(rank, host=host, lease_id=lease_id, now=now, group=group)
        if in_place is not None:
            self._membership.register_in_place(
                in_place, InPlace(job_id, rank), lease_id=lease_id, now=now
            )
        job.recovery.raise_epoch(epoch)
        logger.info("job %s: rank %d came back from %s", job_id, rank, host)
        self._metrics.registered("rank")
        self._members_changed()
        self._metrics.ranks_changed(self._jobs.open_jobs())
        self._recoveries.rank_came_back(job)
        return job, lease_id

    def _refuse(self, job: Job | None, rank: int, error: SpecMismatchError) -> None:
        """Those who wait for ``rank`` in ``job`` learn why it does not come."""
        if job is None:
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
            raise SpecMismatchError(
                f"job {spec.name} uses the transport {spec.transport}, and the servers of the pool "
                f"use {theirs}; all processes of a job use the same: give the ranks "
                f"--transport={theirs} (SessionOptions.transport), or the attention nodes "
                f"--transport={spec.transport}"
            )

    def _new_id(self, spec: JobSpec, owner: str, now: float) -> str:
        """The id of a job that may be opened now. Raises HeldError."""
        if now < self._names_held_until:
            before, whose = self._came_back.get(spec.name, ("", ""))
            successor = successor_of(before) if before and whose == owner else None
            if successor is None:
                raise self._held(spec, now)
            self._came_back[spec.name] = successor, owner
            return successor
        self._n_created += 1
        return new_job_id(spec.name, self.first_epoch + self._n_created)

    def _create_job(self, spec: JobSpec, owner: str, job_id: str) -> Job:
        key = self._job_keys.key_of(job_id, owner)
        job = self._jobs.create(
            spec, job_id=job_id, key=key, owner=owner, first_epoch=self.first_epoch
        )
        logger.info("job %s opened: %s", job.job_id, spec)
        self._announce(job)
        return job

    def _reopen_job(self, spec: JobSpec, job_id: str, key: bytes, owner: str) -> Job:
        """A job from before this control plane, to which all its ranks are to come back."""
        now = self._clock()
        job = self._jobs.create(
            spec,
            job_id=job_id,
            key=key,
            owner=owner,
            first_epoch=self.first_epoch,
            absent=frozenset(range(spec.n_ranks)),
            reopened_at=now,
            return_by=now + self._lease_seconds,
        )
        logger.info("job %s opened again: its ranks come back", job_id)
        if now < self._names_held_until:
            self._came_back[spec.name] = job_id, owner
        self._announce(job)
        return job

    def _held(self, spec: JobSpec, now: float) -> HeldError:
        left = self._names_held_until - now
        return HeldError(
            f"the name {spec.name} may be that of a job that ran before the control plane "
            f"started; unless that comes back, it is free in {left:.1f} s",
            retry_after_seconds=retry_seconds(
                self._names_held_until,
                n_waiting=spec.n_ranks,
                lease_seconds=self._lease_seconds,
                now=now,
            ),
        )

    def _free_name(self, job_id: str, name: str) -> None:
        """Closes a job that has come back under the name of the job ``job_id``, and had ended
        before that was opened. Its tokens stay good for as long as the token secret.

        Raises:
            AlreadyExistsError: it is the other way round.
        """
        other = self._jobs.named(name)
        latest = other.job_id if other is not None else self._came_back.get(name, ("", ""))[0]
        if latest and is_later(latest, job_id):
            raise AlreadyExistsError(
                f"job {job_id} is not known any more, and {latest} has taken its name"
            )
        if other is None:
            return
        self._close(
            other,
            f"its name {name} is that of a job that was opened later, and whose ranks have come "
            "back; open it under another name",
        )

    def _announce(self, job: Job) -> None:
        self._metrics.job_opened(job.spec)
        if job.spec.placement.uses_pool:
            self._streams.send_to_pool(opened_event(job, to_server=True))

    def _members_changed(self) -> None:
        self._metrics.members_changed(self._membership.members())


def new_lease_id() -> str:
    """Names a lease; nobody can guess it."""
    return secrets.token_hex(16)
