"""The open jobs, by id and by name, and why the last closed ones were closed. Pure state."""

from __future__ import annotations

from collections import OrderedDict

from control_plane.errors import OtherOwnerError, SpecMismatchError, UnknownJobError
from control_plane.job import Job
from control_plane.job_spec import JobSpec

REMEMBERED_CLOSED_JOBS = 256


class Jobs:
    """All open jobs. At most one of them has a given name."""

    def __init__(
        self, *, lease_seconds: float, retained_steps: int, max_pending_steps: int
    ) -> None:
        self._lease_seconds = lease_seconds
        self._retained_steps = retained_steps
        self._max_pending_steps = max_pending_steps
        self._open: dict[str, Job] = {}
        self._closed: OrderedDict[str, str] = OrderedDict()

    def joinable(self, spec: JobSpec, rank: int, *, owner: str = "") -> Job | None:
        """The open job that ``rank`` joins, or None if a new one is to be created.

        Raises:
            OtherOwnerError: an open job has the name and is another identity's.
            SpecMismatchError: an open job has the name and another spec.
            AlreadyExistsError: the rank has joined it.
        """
        for job in self._open.values():
            if job.spec.name == spec.name:
                if job.owner != owner:
                    raise OtherOwnerError(
                        f"rank {rank} of {owner!r} opens job {spec.name}, which another identity "
                        "runs; choose another name"
                    )
                differences = job.spec.differences(spec)
                if differences:
                    raise SpecMismatchError(
                        f"rank {rank} opens job {job.job_id} with {differences}; all ranks must "
                        "give the same spec"
                    )
                job.check_can_join(rank)
                return job
        return None

    def create(self, spec: JobSpec, *, job_id: str, key: bytes, owner: str = "") -> Job:
        """A new job without ranks."""
        job = Job(
            job_id,
            spec,
            key,
            owner=owner,
            lease_seconds=self._lease_seconds,
            retained_steps=self._retained_steps,
            max_pending_steps=self._max_pending_steps,
        )
        self._open[job_id] = job
        return job

    def get(self, job_id: str) -> Job:
        """The open job ``job_id``.

        Raises:
            UnknownJobError: there is none; says why it was closed, if that is remembered.
        """
        job = self._open.get(job_id)
        if job is None:
            if job_id in self._closed:
                reason = self._closed[job_id] or "every rank has finished"
                raise UnknownJobError(f"job {job_id} is closed: {reason}")
            raise UnknownJobError(f"there is no job {job_id!r}")
        return job

    def close(self, job: Job, error: str) -> None:
        """Closes ``job``; an empty error means that every rank has finished."""
        job.closed = error
        del self._open[job.job_id]
        self._closed[job.job_id] = error
        while len(self._closed) > REMEMBERED_CLOSED_JOBS:
            self._closed.popitem(last=False)

    def open_jobs(self) -> list[Job]:
        """The open jobs, oldest first."""
        return list(self._open.values())
