"""One job: its ranks and their leases, the manifests of coming steps, the plans of recent ones.

A pure state machine like :mod:`control_plane.membership`: time comes in, nothing goes out. Every
method either does all it says or raises and changes nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from control_plane.errors import (
    AlreadyExistsError,
    BacklogError,
    InvalidRequestError,
    LeaseExpiredError,
    UnknownStepError,
)
from control_plane.job_spec import JobSpec
from control_plane.server_speeds import ServerSpeeds
from control_plane.step import (
    FailedStep,
    PendingStep,
    PlannedStep,
    RankMeasurement,
    ReadyStep,
    ServerMeasurement,
)
from core_attention.manifest import RankManifest


@dataclass
class RankLease:
    """A rank that has joined."""

    rank: int
    lease_id: str
    host: str
    renewed_at: float


class Job:
    """One job, from its first rank's joining to its closing.

    Attributes:
        job_id: names it, unique also among jobs of the same name.
        spec: what its ranks agree on.
        key: checks the tokens of its ranks; secret.
        owner: the identity that opened it, and that every rank must have.
        closed: None while it is open; else why it was closed, empty if every rank has finished.
    """

    def __init__(
        self,
        job_id: str,
        spec: JobSpec,
        key: bytes,
        *,
        owner: str = "",
        lease_seconds: float,
        retained_steps: int,
        max_pending_steps: int,
    ) -> None:
        self.job_id = job_id
        self.spec = spec
        self.key = key
        self.owner = owner
        self.closed: str | None = None
        self._lease_seconds = lease_seconds
        self._retained_steps = retained_steps
        self._max_pending_steps = max_pending_steps
        self._leases: dict[str, RankLease] = {}
        self._left: set[int] = set()
        self._pending: dict[int, PendingStep] = {}
        self._planned: OrderedDict[int, PlannedStep] = OrderedDict()
        # Hash of every manifest of the steps that are ready or planned, so that a rank may repeat
        # a submission whose answer it did not get.
        self._accepted: OrderedDict[int, dict[int, int]] = OrderedDict()
        self._last_reported = dict.fromkeys(range(spec.n_ranks), -1)
        self.speeds = ServerSpeeds()

    def check_can_join(self, rank: int) -> None:
        """Raises unless ``rank`` may join.

        Raises:
            InvalidRequestError: it is none of the job's ranks.
            AlreadyExistsError: it has joined, or has left already.
        """
        if not 0 <= rank < self.spec.n_ranks:
            raise InvalidRequestError(
                f"rank is {rank}; job {self.spec.name} has ranks 0 to {self.spec.n_ranks - 1}"
            )
        if rank in self._left:
            raise AlreadyExistsError(
                f"rank {rank} has left job {self.job_id}, which ranks {self.joined_ranks} still "
                "run; wait until it is closed, or use another name"
            )
        for lease in self._leases.values():
            if lease.rank == rank:
                raise AlreadyExistsError(
                    f"rank {rank} has joined job {self.job_id} from {lease.host}; wait up to "
                    f"{self._lease_seconds:g} s if that process is gone, or use another name"
                )

    def join(self, rank: int, *, host: str, lease_id: str, now: float) -> None:
        """A rank joins; raises as :meth:`check_can_join`."""
        self.check_can_join(rank)
        self._leases[lease_id] = RankLease(rank, lease_id, host, now)

    def renew(self, lease_id: str, *, now: float) -> None:
        """Renews a rank's lease.

        Raises:
            LeaseExpiredError: it expired or is unknown.
        """
        self.lease(lease_id, now=now).renewed_at = now

    def lease(self, lease_id: str, *, now: float) -> RankLease:
        """The rank that holds ``lease_id``.

        Raises:
            LeaseExpiredError: it expired or is unknown.
        """
        lease = self._leases.get(lease_id)
        if lease is None or self._expired(lease, now):
            raise LeaseExpiredError(
                f"no rank of job {self.job_id} holds the lease that came; it expired after "
                f"{self._lease_seconds:g} s without renewal, or the rank has left"
            )
        return lease

    def rank_of(self, lease_id: str) -> int | None:
        """The rank that holds ``lease_id``, expired or not; None if none does."""
        lease = self._leases.get(lease_id)
        return None if lease is None else lease.rank

    def expired_ranks(self, *, now: float) -> list[RankLease]:
        """The ranks whose lease has run out, in rank order."""
        gone = [lease for lease in self._leases.values() if self._expired(lease, now)]
        return sorted(gone, key=lambda lease: lease.rank)

    def leave(self, lease_id: str, *, error: str, now: float) -> int:
        """A rank leaves; with an error, or as the last one, it closes the job. Returns the rank.

        Raises:
            LeaseExpiredError: the lease expired or is unknown.
        """
        rank = self.lease(lease_id, now=now).rank
        del self._leases[lease_id]
        self._left.add(rank)
        if error:
            self.closed = f"rank {rank} failed: {error}"
        elif not self._leases:
            self.closed = ""
        return rank

    def submit(
        self, lease_id: str, manifest: RankManifest, *, forward_only: bool, now: float
    ) -> None:
        """Stores what a rank holds in a coming step. Repeating a submission changes nothing.

        Raises:
            LeaseExpiredError: the lease expired or is unknown.
            InvalidRequestError: the manifest is another rank's, has another number of
                nano-batches than the job, or differs from the rank's earlier one for the step.
            BacklogError: too many steps wait for manifests already.
        """
        rank = self.lease(lease_id, now=now).rank
        self._check_manifest(rank, manifest)
        if manifest.step in self._accepted:
            if self._accepted[manifest.step][rank] != hash((manifest, forward_only)):
                raise self._differs(manifest)
            return
        pending = self._pending.get(manifest.step, PendingStep())
        if rank in pending.manifests:
            if (pending.manifests[rank], pending.forward_only[rank]) != (manifest, forward_only):
                raise self._differs(manifest)
            return
        if manifest.step not in self._pending and len(self._pending) >= self._max_pending_steps:
            raise BacklogError(
                f"step {manifest.step} of rank {rank}: {len(self._pending)} steps of job "
                f"{self.job_id} wait for manifests already, the first, {min(self._pending)}, for "
                f"ranks {self._pending[min(self._pending)].missing(self.spec.n_ranks)}; submit "
                "fewer steps ahead"
            )
        pending.manifests[rank] = manifest
        pending.forward_only[rank] = forward_only
        self._pending[manifest.step] = pending

    def take_decided(self) -> list[ReadyStep | FailedStep]:
        """The pending steps that can be planned now, and those that never can, in step order;
        they are no longer pending. A failed step may be submitted again."""
        decided: list[ReadyStep | FailedStep] = []
        for step in sorted(self._pending):
            outcome = self._decide(step, self._pending[step])
            if outcome is None:
                continue
            pending = self._pending.pop(step)
            if isinstance(outcome, ReadyStep):
                self._accepted[step] = {
                    rank: hash((manifest, pending.forward_only[rank]))
                    for rank, manifest in pending.manifests.items()
                }
            decided.append(outcome)
        return decided

    def planned(self, step: PlannedStep) -> None:
        """Stores the plan of a step, and forgets the oldest beyond the retained number."""
        self._planned[step.step] = step
        while len(self._planned) > self._retained_steps:
            oldest, _ = self._planned.popitem(last=False)
            self._accepted.pop(oldest, None)

    def failed(self, step: int) -> None:
        """A ready step could not be planned; it may be submitted again."""
        self._accepted.pop(step, None)

    def step(self, step: int) -> PlannedStep:
        """A recent step with its plan.

        Raises:
            UnknownStepError: it is not planned yet, or forgotten.
        """
        if step not in self._planned:
            kept = f"{min(self._planned)} to {max(self._planned)}" if self._planned else "none"
            raise UnknownStepError(
                f"step {step} of job {self.job_id} has no plan, or it is forgotten; the last "
                f"{self._retained_steps} are kept, now: {kept}"
            )
        return self._planned[step]

    def report_rank(self, lease_id: str, step: int, measured: RankMeasurement, now: float) -> bool:
        """Stores what a rank measured; returns whether that is new, and not a repetition.

        Raises:
            LeaseExpiredError, UnknownStepError: as :meth:`lease` and :meth:`step`.
            InvalidRequestError: the measurement is another rank's.
        """
        rank = self.lease(lease_id, now=now).rank
        if measured.rank != rank:
            raise InvalidRequestError(
                f"a measurement of rank {measured.rank} came with the lease of rank {rank}"
            )
        ranks = self.step(step).ranks
        is_new = rank not in ranks
        ranks[rank] = measured
        self._last_reported[rank] = max(self._last_reported[rank], step)
        return is_new

    def report_server(self, step: int, measured: ServerMeasurement) -> bool:
        """Stores what a server measured; returns whether that is new, and not a repetition.

        Raises:
            UnknownStepError: as :meth:`step`.
            InvalidRequestError: it has not one number per nano-batch and phase.
        """
        record = self.step(step)
        n_values = {len(measured.forward_busy_seconds), len(measured.backward_busy_seconds)}
        if n_values != {self.spec.n_nano_batches}:
            raise InvalidRequestError(
                f"server {measured.server_id} reports {sorted(n_values)} busy seconds; the job "
                f"has {self.spec.n_nano_batches} nano-batches"
            )
        is_new = measured.server_id not in record.servers
        if is_new:
            self._correct_speed(record, measured)
        record.servers[measured.server_id] = measured
        return is_new

    def unfinished_steps(self) -> list[PlannedStep]:
        """The planned steps that a rank may still be running, in the order of planning. A rank has
        finished a step when it has reported it or a later one, or has left."""
        return [
            record
            for record in self._planned.values()
            if any(
                record.step > last
                for rank, last in self._last_reported.items()
                if rank not in self._left
            )
        ]

    def step_served_by(self, server_id: str) -> int | None:
        """The first step that ``server_id`` may still be needed for, or None."""
        for record in self.unfinished_steps():
            if server_id in record.serving and server_id not in record.servers:
                return record.step
        return None

    @property
    def joined_ranks(self) -> list[int]:
        """The ranks that hold a lease."""
        return sorted(lease.rank for lease in self._leases.values())

    @property
    def rank_hosts(self) -> tuple[str, ...] | None:
        """The host of every rank; None unless all have joined and none has left."""
        hosts = {lease.rank: lease.host for lease in self._leases.values()}
        if len(hosts) < self.spec.n_ranks:
            return None
        return tuple(hosts[rank] for rank in range(self.spec.n_ranks))

    @property
    def n_pending_steps(self) -> int:
        """Steps of which some manifests are here and others are not."""
        return len(self._pending)

    @property
    def pending_steps(self) -> dict[int, list[int]]:
        """Of each pending step, in order, the ranks whose manifest is missing."""
        return {
            step: self._pending[step].missing(self.spec.n_ranks) for step in sorted(self._pending)
        }

    @property
    def planned_step(self) -> int | None:
        """The latest step with a plan."""
        return max(self._planned, default=None)

    def _decide(self, step: int, pending: PendingStep) -> ReadyStep | FailedStep | None:
        missing = pending.missing(self.spec.n_ranks)
        gone = [rank for rank in missing if rank in self._left]
        if gone:
            return FailedStep(
                step,
                f"ranks {gone} left the job without a manifest for step {step}; all ranks must "
                "run the same steps",
            )
        if missing:
            return None
        if len(set(pending.forward_only.values())) > 1:
            forward_only = [rank for rank, value in sorted(pending.forward_only.items()) if value]
            return FailedStep(
                step,
                f"ranks {forward_only} say that step {step} is forward only, the others that it "
                "is not; all ranks must agree",
            )
        return ReadyStep(
            step=step,
            manifests=tuple(pending.manifests[rank] for rank in range(self.spec.n_ranks)),
            forward_only=pending.forward_only[0],
        )

    def _correct_speed(self, record: PlannedStep, measured: ServerMeasurement) -> None:
        predicted = record.predicted_seconds(measured.server_id)
        if predicted is not None:
            self.speeds.measured(
                measured.server_id,
                planned_speed=record.speeds.get(measured.server_id, 1.0),
                predicted_seconds=predicted * self.spec.n_layers,
                measured_seconds=sum(sum(measured.busy_seconds(phase)) for phase in record.phases),
            )

    def _check_manifest(self, rank: int, manifest: RankManifest) -> None:
        if manifest.rank != rank:
            raise InvalidRequestError(
                f"a manifest of rank {manifest.rank} came with the lease of rank {rank}"
            )
        if len(manifest.nano_batches) != self.spec.n_nano_batches:
            raise InvalidRequestError(
                f"step {manifest.step} of rank {rank} has {len(manifest.nano_batches)} "
                f"nano-batches; job {self.job_id} has {self.spec.n_nano_batches}"
            )

    def _differs(self, manifest: RankManifest) -> InvalidRequestError:
        return InvalidRequestError(
            f"rank {manifest.rank} has submitted another manifest for step {manifest.step} of job "
            f"{self.job_id}; a step is submitted once, or again after it failed"
        )

    def _expired(self, lease: RankLease, now: float) -> bool:
        return now - lease.renewed_at > self._lease_seconds
