"""The open jobs, by id and by name, and why the last closed ones were closed. Pure state."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from control_plane.errors import RefusedError
from control_plane.jobs.job import Job
from control_plane.jobs.job_spec import MAX_RANKS, JobSpec
from distca.contract.rpc_errors import Reason

REMEMBERED_CLOSED_JOBS = 256


class Jobs:
    """All open jobs."""

    def __init__(
        self,
        *,
        lease_seconds: float,
        retained_steps: int,
        max_pending_steps: int,
        max_jobs: int = 256,
        max_ranks: int = MAX_RANKS,
        max_manifest_bytes: int = 512 * 2**20,
    ) -> None:
        self._lease_seconds = lease_seconds
        self._retained_steps = retained_steps
        self._max_pending_steps = max_pending_steps
        self._max_jobs = max_jobs
        self._max_ranks = max_ranks
        self._max_manifest_bytes = max_manifest_bytes
        self._open: dict[str, Job] = {}
        self._closed: OrderedDict[str, str] = OrderedDict()

    def check_room(self, spec: JobSpec, owner: str) -> None:
        """Check that ``owner`` may open one more job, of ``spec``."""
        who = owner or "without certificates all"
        jobs = self._of(owner)
        if len(jobs) >= self._max_jobs:
            raise RefusedError(
                Reason.QUOTA,
                f"{who} runs {len(jobs)} jobs, as many as one identity may "
                f"(max_jobs_per_identity); {spec.name} can be opened when one of them ends",
            )
        n_ranks = sum(job.spec.n_ranks for job in jobs)
        if n_ranks + spec.n_ranks > self._max_ranks:
            raise RefusedError(
                Reason.QUOTA,
                f"{who} runs jobs of {n_ranks} ranks, and {spec.name} has {spec.n_ranks} more; one "
                f"identity may have {self._max_ranks} (max_ranks_per_identity)",
            )

    def make_room(self, owner: str, nbytes: int) -> None:
        """Makes room for ``nbytes`` more of manifests for the jobs of ``owner``: finished steps,
        which are kept for late readers alone, are forgotten for it.

        Raises:
            RefusedError: those of unfinished steps are too many.
        """
        while (kept := self.manifest_bytes(owner)) + nbytes > self._max_manifest_bytes:
            if not any(job.forget_finished() for job in self._of(owner)):
                raise RefusedError(
                    Reason.QUOTA,
                    f"manifests of {owner!r} come to {kept} bytes, and {nbytes} more came; valid "
                    f"are {self._max_manifest_bytes} (max_manifest_bytes_per_identity): submit "
                    "fewer steps ahead",
                )

    def manifest_bytes(self, owner: str) -> int:
        """The bytes of the manifests that are kept for the jobs of ``owner``."""
        return sum(job.manifest_bytes for job in self._of(owner))

    def stream_broken(self, job_id: str, rank: int, *, now: float) -> None:
        """A rank's stream of events has broken; nothing if the job is not open any more."""
        job = self._open.get(job_id)
        if job is not None:
            job.leases.stream_broken(rank, now=now)

    def create(self, spec: JobSpec, *, job_id: str, key: bytes, **of_job: Any) -> Job:
        """A new job without ranks, or one from before this control plane; the rest as of
        :class:`Job`."""
        job = Job(
            job_id,
            spec,
            key,
            lease_seconds=self._lease_seconds,
            retained_steps=self._retained_steps,
            max_pending_steps=self._max_pending_steps,
            **of_job,
        )
        self._open[job_id] = job
        return job

    def get(self, job_id: str) -> Job:
        """The open job ``job_id``."""
        job = self._open.get(job_id)
        if job is None:
            if job_id in self._closed:
                reason = self._closed[job_id] or "every rank has finished"
                raise RefusedError(Reason.UNKNOWN_JOB, f"job {job_id} is closed: {reason}")
            raise RefusedError(Reason.UNKNOWN_JOB, f"there is no job {job_id!r}")
        return job

    def named(self, name: str) -> Job | None:
        """The last of the open jobs of that name: ranks of one before may still finish it."""
        return next((job for job in reversed(self._open.values()) if job.spec.name == name), None)

    def find(self, job_id: str, spec: JobSpec) -> Job | None:
        """The open job ``job_id``, whose ranks come back with ``spec``; None if it is not known."""
        if job_id in self._closed:
            self.get(job_id)
        job = self._open.get(job_id)
        if job is not None:
            differences = job.spec.differences(spec)
            if differences:
                raise RefusedError(
                    Reason.SPEC_MISMATCH,
                    f"a rank comes back to job {job_id} with {differences}; all ranks must give "
                    "the same spec",
                )
            return job
        return None

    def close(self, job: Job, error: str) -> None:
        """Closes ``job``; an empty error means that every rank has finished."""
        job.closed = error
        del self._open[job.job_id]
        self._closed[job.job_id] = error
        while len(self._closed) > REMEMBERED_CLOSED_JOBS:
            self._closed.popitem(last=False)

    def _of(self, owner: str) -> list[Job]:
        return [job for job in self._open.values() if job.owner == owner]

    def open_jobs(self) -> list[Job]:
        """The open jobs, oldest first."""
        return list(self._open.values())
