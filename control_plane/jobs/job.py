"""One job: its ranks and their leases, the manifests of coming steps, the plans of recent ones.

A pure state machine like :mod:`control_plane.jobs.membership`: time comes in, nothing goes out.
Every method either does all it says or raises and changes nothing.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from control_plane.errors import InvalidRequestError, RefusedError
from control_plane.jobs.job_spec import JobSpec
from control_plane.jobs.open_step import HandIn, OpenStep
from control_plane.jobs.quarantine import Quarantine
from control_plane.jobs.rank_leases import RankLeases
from control_plane.jobs.recovery import Answers, JobRecovery, is_finished
from control_plane.jobs.reported_steps import ReportedSteps
from control_plane.jobs.same_documents import Group, TensorParallelGroups, difference_of_stages
from control_plane.jobs.server_speeds import ServerSpeeds
from control_plane.jobs.step import (
    MAX_MISSING,
    FailedStep,
    PendingStep,
    ReadyStep,
    StepRecord,
    busy_seconds,
)
from control_plane.jobs.waits import Waits
from core_attention.manifest import RankManifest
from core_attention.step_lane import placed
from distca.contract.rpc_errors import Reason
from distca.v1.jobs_pb2 import RankMeasurement, ServerMeasurement, StepProgress, StepWaiting

SEGMENT_BYTES = 512
"""The bytes of a segment of a manifest, with the plan and the slices that it becomes; a test
measures it."""

NO_SEQUENCES: Mapping[int, int] = MappingProxyType({})


def kept_bytes(manifest: RankManifest) -> int:
    """The bytes of ``manifest``, with its part of the plan and of the slices that it becomes."""
    return SEGMENT_BYTES * (1 + len(manifest.columns.length))


class Job:
    """One job, from its first rank's joining to its closing.

    Attributes:
        job_id: names it, unique also among jobs of the same name.
        spec: what its ranks agree on.
        key: checks the tokens of its ranks; secret.
        owner: the identity that opened it, and that every rank must have.
        closed: None while it is open; else why it was closed, empty if every rank has finished.
        leases: its ranks.
        recovery: its epochs.
        open_step: that ranks join, if they hand in steps without numbers.
        quarantine: pool servers that it does not use now.
        speeds: what was learned of its servers.
        reopened_at: when it was opened again, if it is from before this control plane.
        return_by: when the ranks that are to come back must be there.
        why_at_home: why its last plan leaves documents at home; empty if it does not.
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
        first_epoch: int = 0,
        absent: frozenset[int] = frozenset(),
        reopened_at: float = 0.0,
        return_by: float = math.inf,
    ) -> None:
        self.job_id = job_id
        self.spec = spec
        self.key = key
        self.owner = owner
        self.closed: str | None = None
        self.recovery = JobRecovery(first_epoch)
        self.quarantine = Quarantine()
        self.speeds = ServerSpeeds()
        self._retained_steps = retained_steps
        self._max_pending_steps = max_pending_steps
        self.is_resumed = bool(absent)
        self.reopened_at = reopened_at
        self.return_by = return_by
        self.why_at_home = ""
        self.leases = RankLeases(job_id, spec.n_ranks, lease_seconds=lease_seconds, absent=absent)
        self._groups = TensorParallelGroups()
        # No method of the job: memory of one that is closed is freed with its last reference.
        group_of = functools.partial(_group_of, spec, self._groups)
        self.open_step = OpenStep(spec.n_ranks, spec.n_nano_batches, group_of)
        # Steps that an earlier control plane has numbered, as their ranks hand them in again.
        self._numbered: dict[int, PendingStep] = {}
        self._pending: dict[int, PendingStep] = {}
        # With all manifests, and without a plan that counts.
        self._ready: dict[int, ReadyStep] = {}
        self._planned: OrderedDict[int, StepRecord] = OrderedDict()
        # Fingerprint of every manifest of the steps that are ready or planned, so that a rank may
        # repeat a submission whose answer it did not get.
        self._accepted: OrderedDict[int, dict[int, tuple[int, bool]]] = OrderedDict()
        self._manifest_bytes: dict[int, int] = {}
        self._reported = ReportedSteps(spec.n_ranks)
        # By rank, then step: why.
        self._given_up: dict[int, dict[int, str]] = {}
        # By rank that has not joined: why it could not.
        self._refused: dict[int, str] = {}
        self._waits = Waits()
        # By rank, if it has told: it hands in no step before this one any more.
        self._next_step: dict[int, int] = {}
        self._finished_step = -1

    def has_place_for(self, spec: JobSpec, rank: int, *, replace: bool) -> bool:
        """Return whether ``rank`` joins this job; if not, it opens the next one of the name.

        The name is this job's while all ranks that have joined watch. Where one is silent since its
        stream broke, or is to come back, processes are gone, and what asks is their successor. So
        it is where the rank has left, and others still finish their steps.

        Args:
            spec: that the rank gives.
            rank: of a job of that spec.
            replace: it ends this job rather than be refused.

        Raises:
            RefusedError: the job has another spec, or the rank has joined it.
        """
        if rank in self.leases.left:
            return False
        is_over = self.leases.is_broken
        differs = bool(self.spec.differences(spec))
        if differs and (self._gathers or not replace) and not is_over:
            raise self._mismatch(rank, spec)
        why = None if differs else self.leases.why_taken(rank)
        if why is not None and not is_over and not replace:
            raise RefusedError(Reason.ALREADY_EXISTS, f"{why}, and lives")
        return not (is_over or differs or why)

    def join(self, rank: int, *, host: str, lease_id: str, now: float, group: Group = ()) -> None:
        """A rank joins, as one of the tensor-parallel ``group``."""
        self._groups.check(rank, group)
        self.leases.join(rank, host=host, lease_id=lease_id, now=now)
        self._groups.add(rank, group)
        self._refused.pop(rank, None)

    def refused(self, rank: int, why: str) -> None:
        """A rank cannot join with what it has given. Steps wait for ranks that have not joined, so
        they fail with the reason, until that rank joins."""
        if rank not in self.known_ranks:
            self._refused[rank] = why

    def come_back(
        self, rank: int, *, host: str, lease_id: str, now: float, group: Group = ()
    ) -> None:
        """A rank that has lost its lease comes back."""
        self._groups.check(rank, group)
        self.leases.come_back(rank, host=host, lease_id=lease_id, now=now)
        self._groups.add(rank, group)

    def went_on(self, lease_id: str, next_step: int) -> bool:
        """A rank has left the steps before ``next_step`` behind; returns whether that is new."""
        rank = self.leases.rank_of(lease_id)
        if rank is None or next_step <= self._next_step.get(rank, 0):
            return False
        self._next_step[rank] = next_step
        return True

    def leave(self, lease_id: str, *, error: str, now: float) -> int:
        """A rank leaves; with an error, or as the last one, it closes the job. Returns the rank."""
        rank = self.leases.leave(lease_id, now=now)
        self.open_step.leave(rank)
        if error:
            self.closed = f"rank {rank} failed: {error}"
        elif not self.leases.joined and not self.leases.absent:
            self.closed = ""
        return rank

    @property
    def manifest_bytes(self) -> int:
        """The bytes of the manifests of open, pending, ready and planned steps."""
        kept = self._pending.keys() | self._ready.keys() | self._planned.keys()
        self._manifest_bytes = {
            step: nbytes for step, nbytes in self._manifest_bytes.items() if step in kept
        }
        waiting = self.open_step.waiting.values()
        return sum(self._manifest_bytes.values()) + sum(kept_bytes(h.manifest) for h in waiting)

    def submit(
        self,
        lease_id: str,
        manifest: RankManifest,
        *,
        forward_only: bool,
        now: float,
    ) -> None:
        """Stores what a rank holds in a coming step. Repeating a submission changes nothing."""
        rank = self.leases.get(lease_id, now=now).rank
        self._check_manifest(rank, manifest)
        if manifest.step <= self._finished_step:
            # From a rank that has come back, and has not heard yet that all are through with it.
            return
        if manifest.step in self._accepted:
            if self._accepted[manifest.step].get(rank) != (manifest.fingerprint, forward_only):
                raise self._differs(manifest)
            return
        pending = self._pending.get(manifest.step, PendingStep())
        if rank in pending.manifests:
            kept = pending.manifests[rank].fingerprint, pending.forward_only[rank]
            if kept != (manifest.fingerprint, forward_only):
                raise self._differs(manifest)
            return
        if manifest.step not in self._pending and len(self._pending) >= self._max_pending_steps:
            raise RefusedError(
                Reason.BACKLOG,
                f"step {manifest.step} of rank {rank}: {len(self._pending)} steps of job "
                f"{self.job_id} wait for manifests already, the first, {min(self._pending)}, for "
                f"ranks {self._pending[min(self._pending)].missing(self.spec.n_ranks)}; submit "
                "fewer steps ahead",
            )
        pending.manifests[rank] = manifest
        pending.forward_only[rank] = forward_only
        self._pending[manifest.step] = pending
        self.keeps(manifest.step, kept_bytes(manifest))

    def join_step(self, lease_id: str, hand_in: HandIn) -> None:
        """A rank joins the open step. Repeating a hand-in changes nothing."""
        rank = self.leases.get(lease_id, now=hand_in.since).rank
        self._check_manifest(rank, hand_in.manifest)
        n_places, rest = divmod(self.spec.n_nano_batches, hand_in.turns)
        if not n_places or rest:
            raise InvalidRequestError(
                f"rank {rank} has turns={hand_in.turns}; it must divide n_nano_batches="
                f"{self.spec.n_nano_batches}"
            )
        if (hand_in.manifest.columns.nano_batch >= hand_in.turns).any():
            raise InvalidRequestError(
                f"hand-in {hand_in.sequence} of rank {rank} has documents beyond its first "
                f"{hand_in.turns} nano-batches; the step's number says where they are"
            )
        if hand_in.open_places.issuperset(range(n_places)):
            raise InvalidRequestError(
                f"rank {rank} has steps open in all {n_places} places; end one before the next"
            )
        self.open_step.hand_in(rank, hand_in)

    def hand_in_again(self, lease_id: str, hand_in: HandIn) -> None:
        """A rank that has come back knows the number that a hand-in has got. Where the step is
        not known, it is planned at the end of the recovery, with those that have it."""
        rank = self.leases.get(lease_id, now=hand_in.since).rank
        manifest = hand_in.manifest
        self._check_manifest(rank, manifest)
        self.open_step.received(rank, hand_in.sequence)
        step = manifest.step
        if self.is_recovering and step not in self._accepted and step > self._finished_step:
            if step not in self._numbered and len(self._numbered) >= self._retained_steps:
                raise RefusedError(
                    Reason.BACKLOG,
                    f"rank {rank} comes back with step {step}, and {len(self._numbered)} others of "
                    f"job {self.job_id} are unfinished; close the job",
                )
            pending = self._numbered.setdefault(step, PendingStep())
            pending.manifests[rank] = manifest
            pending.forward_only[rank] = hand_in.forward_only

    def take_joined(self, *, now: float) -> ReadyStep | FailedStep | None:
        """The open step, if it can be planned now, or never can; it is no longer open."""
        if self.is_recovering:
            return None
        joined = self.open_step.take(math.inf if self._lacks_ranks else now)
        if joined is None:
            return None
        step = joined.step
        manifests = {
            rank: placed(hand_in.manifest, step, hand_in.turns)
            for rank, hand_in in joined.hand_ins.items()
        }
        forward_only = any(hand_in.forward_only for hand_in in joined.hand_ins.values())
        ready = self._make_ready(
            step,
            PendingStep(manifests, dict.fromkeys(manifests, forward_only)),
            sequences={rank: hand_in.sequence for rank, hand_in in joined.hand_ins.items()},
        )
        if len(manifests) < self.spec.n_ranks - len(self.leases.left):
            ready = replace(ready, without="late" if joined.is_late else "round")
        self._ready[step] = ready
        why = self._why_without_plan(manifests)
        return FailedStep(step, why) if why else ready

    def _make_ready(
        self, step: int, pending: PendingStep, sequences: Mapping[int, int] = NO_SEQUENCES
    ) -> ReadyStep:
        """A step of the ranks that have joined it; the others are without rows."""
        nothing: list[list[int]] = [[]] * self.spec.n_nano_batches
        self._accept(step, pending)
        self._reported.joined(step, pending.manifests)
        for manifest in pending.manifests.values():
            self.keeps(step, kept_bytes(manifest))
        return ReadyStep(
            step=step,
            manifests=tuple(
                pending.manifests.get(rank) or RankManifest.from_lengths(step, rank, nothing)
                for rank in range(self.spec.n_ranks)
            ),
            forward_only=any(pending.forward_only.values()),
            epoch=self.epoch,
            sequences=sequences,
        )

    def _accept(self, step: int, pending: PendingStep) -> None:
        self._accepted[step] = {
            rank: (manifest.fingerprint, pending.forward_only[rank])
            for rank, manifest in pending.manifests.items()
        }

    def keeps(self, step: int, nbytes: int) -> None:
        """So many bytes more are kept for a step."""
        self._manifest_bytes[step] = self._manifest_bytes.get(step, 0) + nbytes

    def more_bytes(self, step: int, plan_bytes: int) -> int:
        """The bytes by which the slices of a step exceed the estimate made when its manifests came:
        where many members hold pieces of one document, each gets all."""
        return max(plan_bytes - self._manifest_bytes.get(step, 0), 0)

    def take_decided(self) -> list[ReadyStep | FailedStep]:
        """The pending steps that can be planned now, and those that never can, in step order;
        they are no longer pending. A failed step may be submitted again. A step that becomes ready
        during a recovery is planned at its end."""
        decided: list[ReadyStep | FailedStep] = []
        for step in sorted(self._pending):
            outcome = self._decide(step, self._pending[step])
            if outcome is None:
                continue
            pending = self._pending.pop(step)
            if isinstance(outcome, ReadyStep):
                self._accept(step, pending)
                self._ready[step] = outcome
                if self.is_recovering:
                    continue
            decided.append(outcome)
        return decided

    def planned(self, step: StepRecord) -> bool:
        """Stores the plan of a step, and forgets the oldest beyond the retained number; returns
        whether the step had a plan before, which is void now."""
        before = self._planned.pop(step.step, None)
        if before is not None:
            step.ranks.update(before.ranks)
        self._planned[step.step] = step
        self._ready.pop(step.step, None)
        while len(self._planned) > self._retained_steps:
            self._forget(next(iter(self._planned)))
        return before is not None

    def forget_finished(self) -> bool:
        """Forgets the oldest step that every rank has finished, but for the last; returns whether
        there was one."""
        oldest = next(iter(self._planned), self._finished_step)
        if oldest >= self._finished_step:
            return False
        self._forget(oldest)
        return True

    def failed(self, step: int) -> Mapping[int, int]:
        """A ready step could not be planned; it may be submitted again. If it had a plan, that is
        void. Returns which of their hand-ins it was, by rank that has joined it."""
        known = self._ready.get(step) or self._planned.get(step)
        for steps in (self._ready, self._accepted, self._planned):
            steps.pop(step, None)
        self._reported.failed(step)
        self._waits = Waits()
        return known.sequences if known is not None else NO_SEQUENCES

    def step(self, step: int) -> StepRecord:
        """A recent step with its plan."""
        if step not in self._planned:
            kept = f"{min(self._planned)} to {max(self._planned)}" if self._planned else "none"
            raise RefusedError(
                Reason.UNKNOWN_STEP,
                f"step {step} of job {self.job_id} has no plan, or it is forgotten; the last "
                f"{self._retained_steps} are kept, now: {kept}",
            )
        return self._planned[step]

    def report_rank(self, lease_id: str, step: int, measured: RankMeasurement, now: float) -> bool:
        """Stores what a rank measured; returns whether that is new, and not a repetition. During a
        recovery it may be of a step whose plan is not known here: that is only finished.
        """
        rank = self.leases.get(lease_id, now=now).rank
        if measured.rank != rank:
            raise InvalidRequestError(
                f"a measurement of rank {measured.rank} came with the lease of rank {rank}"
            )
        is_new = False
        is_told = step <= self._reported.last(rank) or self.is_recovering
        is_told = is_told or step in self._ready or step in self._pending
        if self.open_step.has_joined(rank):
            # It may have numbered and run the step at home.
            is_told = True
            self.open_step.numbered(step)
        if step in self._planned or not is_told:
            ranks = self.step(step).ranks
            is_new = rank not in ranks
            ranks[rank] = measured
        self._reported.reported(rank, step)
        self.open_step.took(rank, measured.step_seconds)
        self.recovery.progressed()
        return is_new

    def give_up(self, lease_id: str, step: int, reason: str, *, now: float) -> int:
        """A rank leaves ``step`` before it is complete; returns the rank."""
        rank = self.leases.get(lease_id, now=now).rank
        if step > self._finished_step:
            given_up = self._given_up.setdefault(rank, {})
            if step not in given_up and len(given_up) >= self._max_pending_steps:
                raise RefusedError(
                    Reason.BACKLOG,
                    f"rank {rank} gives up step {step} of job {self.job_id}, and has given up "
                    f"{len(given_up)} others that are unfinished; close the job",
                )
            given_up[step] = reason
            self._reported.reported(rank, step)
        return rank

    def has_sent(self, lease_id: str, step: int, sent_ticks: Sequence[int]) -> None:
        """A rank has sent so many ticks of each nano-batch of ``step``."""
        rank = self.leases.rank_of(lease_id)
        if rank is not None:
            self._check_sent(rank, sent_ticks)
            self._waits.has_sent(rank, step, sent_ticks)

    def wait(self, lease_id: str, step: int, wait: StepWaiting, *, now: float) -> str:
        """A rank has waited long for a tick of ``step``; the different orders of it and another
        rank, in words, or nothing."""
        rank = self.leases.get(lease_id, now=now).rank
        self._check_sent(rank, wait.sent_ticks, wait.nano_batch)
        if self.is_recovering or step not in self._planned:
            return ""
        manifest = self._planned[step].plan.manifest
        return self._waits.wait(
            rank, step, wait, lambda rank, nano: bool(manifest.tokens_per_rank(nano)[rank])
        )

    def _check_sent(self, rank: int, sent_ticks: Sequence[int], nano_batch: int = 0) -> None:
        n_nano_batches = self.spec.n_nano_batches
        if len(sent_ticks) != n_nano_batches or nano_batch >= n_nano_batches:
            raise InvalidRequestError(
                f"rank {rank} has sent_ticks {list(sent_ticks)} and waits in nano-batch "
                f"{nano_batch}; job {self.job_id} has {n_nano_batches} nano-batches"
            )

    def others_may_run(self, step: int, rank: int) -> bool:
        """Return whether a rank other than ``rank`` may still be running the planned ``step``."""
        return step in self._planned and any(
            other != rank and self._reported.last(other) < step for other in self._staying
        )

    def report_server(self, step: int, measured: ServerMeasurement) -> bool:
        """Stores what a server measured; returns whether that is new, and not a repetition."""
        record = self.step(step)
        n_values = {
            len(measured.forward_busy_seconds),
            len(measured.backward_busy_seconds),
            len(measured.backward_layers),
        }
        if n_values != {self.spec.n_nano_batches}:
            raise InvalidRequestError(
                f"server {measured.server_id} reports {sorted(n_values)} busy seconds and backward "
                f"layers; the job has {self.spec.n_nano_batches} nano-batches"
            )
        if max(measured.backward_layers) > self.spec.n_layers:
            raise InvalidRequestError(
                f"server {measured.server_id} reports backward_layers "
                f"{list(measured.backward_layers)}; the job has {self.spec.n_layers} layers"
            )
        is_new = measured.server_id not in record.servers
        if is_new:
            self._correct_speed(record, measured)
        record.servers[measured.server_id] = measured
        return is_new

    def tokens_of(self, record: StepRecord) -> int:
        """Tokens of a step, of the ranks that have reported it. Stages of one pipeline and ranks of
        one tensor-parallel group hold the same tokens, which count once."""
        pipelining = self.spec.pipelining
        return sum(
            measured.tokens
            for rank, measured in record.ranks.items()
            if self._groups.is_first(rank)
            and (pipelining is None or pipelining.pipeline_ranks[rank] == 0)
        )

    def unfinished_steps(self) -> list[StepRecord]:
        """The planned steps that a rank may still be running, in the order of planning. A rank has
        finished a step when it has reported it or a later one, or has left."""
        first = min(map(self._reported.last, self._staying), default=math.inf) + 1
        return [record for record in self._planned.values() if record.step >= first]

    def steps_to_tell(self) -> list[StepRecord]:
        """The unfinished steps whose plan counts, in the order of planning."""
        if self.is_recovering:
            return []
        return [record for record in self.unfinished_steps() if record.step not in self._ready]

    def names_server(self, server_id: str) -> bool:
        """Return whether a plan that counts, of a step that is not finished, has a task for it."""
        return any(server_id in record.serving for record in self.steps_to_tell())

    def take_finished(self) -> int | None:
        """The last step that every rank has finished, as it has those before; None if that is
        known already. What is known of those steps beside their plans is forgotten."""
        # Asked after every call of a rank: the first that is behind is the answer.
        if any(self._reported.last(rank) <= self._finished_step for rank in self._staying):
            return None
        finished = min(map(self._reported.last, self._staying), default=self._finished_step)
        if finished <= self._finished_step:
            return None
        for step, record in self._planned.items():
            if step <= finished:
                record.drop_slicer()
        self._finished_step = finished
        for given_up in self._given_up.values():
            for step in [step for step in given_up if step <= finished]:
                del given_up[step]
        for known in (self._pending, self._ready):
            for step in [step for step in known if step <= finished]:
                del known[step]
        return finished

    def begin_recovery(self, *, now: float) -> None:
        """Makes all plans void: unfinished steps are to be planned again, once all ranks have
        answered."""
        self.recovery.begin(now=now)
        self._waits = Waits()
        for record in self.unfinished_steps():
            self._ready[record.step] = ReadyStep(
                step=record.step,
                manifest=record.plan.manifest,
                forward_only=record.forward_only,
                begun=True,
                sequences=record.sequences,
            )

    def check_progress(self, steps: Sequence[StepProgress]) -> None:
        """Raises unless a rank of this job can be so far."""
        most = 2 * self.spec.n_layers
        for progress in steps:
            ticks = progress.complete_ticks
            if len(ticks) != self.spec.n_nano_batches or max(ticks) > most:
                raise InvalidRequestError(
                    f"step {progress.step} has complete_ticks {list(ticks)}; job {self.job_id} has "
                    f"{self.spec.n_nano_batches} nano-batches with up to {most} ticks each"
                )

    def end_recovery(self) -> list[ReadyStep]:
        """Ends the recovery that runs, when no answer is missing; the steps to plan now, in
        order."""
        answers = self.recovery.end()
        for step, pending in sorted(self._numbered.items()):
            self._ready[step] = self._make_ready(step, pending)
            self.open_step.numbered(step)
        self._numbered.clear()
        for rank, steps in answers.items():
            for progress in steps.values():
                if progress.done:
                    self._reported.reported(rank, progress.step)
        for known in (self._pending, self._ready):
            for step in [step for step in known if is_finished(step, answers)]:
                del known[step]
        for step, ready in self._ready.items():
            self._ready[step] = replace(
                ready,
                epoch=self.recovery.epoch,
                complete_ticks=self._complete_ticks(ready, answers),
                left=self._without(ready, answers),
                begun=ready.begun or _is_begun(step, answers),
            )
        return [self._ready[step] for step in sorted(self._ready)]

    def step_served_by(self, server_id: str) -> int | None:
        """The first step that ``server_id`` may still be needed for, or None."""
        for record in self.steps_to_tell():
            if server_id in record.serving and server_id not in record.servers:
                return record.step
        return None

    def step_without(self, rank: int) -> int | None:
        """The first planned step that ``rank``, which has left, has not finished, and others have
        not either; None if there is none."""
        return next(
            (
                record.step
                for record in self.steps_to_tell()
                if record.step > self._reported.last(rank)
            ),
            None,
        )

    @property
    def _staying(self) -> Iterator[int]:
        """The ranks that have not left."""
        left = self.leases.left
        return (rank for rank in range(self.spec.n_ranks) if rank not in left)

    @property
    def known_ranks(self) -> list[int]:
        """The ranks that have joined, whether or not they have left since."""
        return sorted({*self.leases.joined, *self.leases.left})

    @property
    def is_recovering(self) -> bool:
        """Return whether no plan is made now: a recovery runs, or one is to come first, because the
        job was opened under another control plane."""
        return self.recovery.runs or (self.is_resumed and not self.recovery.began)

    @property
    def epoch(self) -> int:
        """The epoch of the plans that are made now."""
        return self.recovery.epoch

    @property
    def finished_step(self) -> int:
        """The last step that every rank has finished, or -1."""
        return self._finished_step

    @property
    def n_pending_steps(self) -> int:
        """Steps of which some manifests are here and others are not."""
        return len(self._pending) + bool(self.open_step.waiting)

    @property
    def pending_steps(self) -> dict[int, list[int]]:
        """The ranks whose manifest is missing, of each pending step in order, the first
        :data:`~control_plane.jobs.step.MAX_MISSING` of them."""
        pending = {
            step: self._pending[step].missing(self.spec.n_ranks) for step in sorted(self._pending)
        }
        if self.open_step.waiting:
            pending[self.open_step.next_step] = self.open_step.missing[:MAX_MISSING]
        return pending

    @property
    def planned_step(self) -> int | None:
        """The latest step with a plan."""
        return max(self._planned, default=None)

    @property
    def _gathers(self) -> bool:
        """Return whether ranks are still to join for the first time."""
        return not self.is_resumed and self.leases.gather

    def _mismatch(self, rank: int, spec: JobSpec) -> RefusedError:
        named = spec.transport != self.spec.transport
        return RefusedError(
            Reason.SPEC_MISMATCH,
            f"rank {rank} opens job {self.job_id} with {self.spec.differences(spec)}; all ranks "
            "must give the same spec"
            + (" (give all the same --transport by name)" if named else ""),
        )

    def _forget(self, step: int) -> None:
        del self._planned[step]
        self._accepted.pop(step, None)

    def _decide(self, step: int, pending: PendingStep) -> ReadyStep | FailedStep | None:
        passed = {rank for rank, next_step in self._next_step.items() if step < next_step}
        if gone := sorted((self.leases.left | passed) - pending.manifests.keys()):
            return FailedStep(
                step,
                f"ranks {gone} have left, or gone on, without a manifest for step {step}; all "
                "ranks must run the same steps",
            )
        if self._lacks_ranks:
            return FailedStep(step, self._lacks_ranks)
        if len(pending.manifests) < self.spec.n_ranks:
            return None
        if len(set(pending.forward_only.values())) > 1:
            forward_only = [rank for rank, value in sorted(pending.forward_only.items()) if value]
            return FailedStep(
                step,
                f"ranks {forward_only} say that step {step} is forward only, the others that it "
                "is not; all ranks must agree",
            )
        if why := self._why_without_plan(pending.manifests):
            return FailedStep(step, why)
        return ReadyStep(
            step=step,
            manifests=tuple(pending.manifests[rank] for rank in range(self.spec.n_ranks)),
            forward_only=pending.forward_only[0],
            epoch=self.epoch,
        )

    @property
    def _lacks_ranks(self) -> str:
        if not (self._refused and self._gathers):
            return ""
        return f"the job lacks ranks, and one was refused: {next(iter(self._refused.values()))}"

    def _why_without_plan(self, manifests: Mapping[int, RankManifest]) -> str:
        """The reason why these are not one step; empty if they are."""
        why = self._lacks_ranks or self._groups.difference(manifests)
        if not why and self.spec.pipelining is not None:
            why = difference_of_stages(self.spec.pipelining, manifests)
        return why

    def _complete_ticks(self, ready: ReadyStep, answers: Answers) -> tuple[tuple[int, ...], ...]:
        """The last progress of each rank. Ranks without the step have nothing outstanding."""
        n_nano_batches, without = self.spec.n_nano_batches, self._without(ready, answers)
        all_ticks = (self._lane_ticks(ready),) * n_nano_batches
        none = StepProgress(step=ready.step, complete_ticks=(0,) * n_nano_batches)
        return tuple(
            all_ticks
            if rank in without
            else tuple(answers.get(rank, {}).get(ready.step, none).complete_ticks)
            for rank in range(self.spec.n_ranks)
        )

    def _without(self, ready: ReadyStep, answers: Answers) -> dict[int, str]:
        """The ranks that have left the job, or have left the step behind unfinished, and why: they
        send nothing of it any more."""
        given_up = {
            rank: f"gave the step up: {self._why_given_up(rank, ready.step)}"
            for rank, steps in answers.items()
            if ready.step in steps
            and steps[ready.step].done
            and min(steps[ready.step].complete_ticks) < self._lane_ticks(ready)
        }
        return given_up | dict.fromkeys(self.leases.left, "has left the job")

    def _why_given_up(self, rank: int, step: int) -> str:
        return self._given_up.get(rank, {}).get(step, "it left it out")

    def _lane_ticks(self, ready: ReadyStep) -> int:
        return self.spec.n_layers * (1 if ready.forward_only else 2)

    def _correct_speed(self, record: StepRecord, measured: ServerMeasurement) -> None:
        predicted = record.predicted_seconds(measured, self.spec.n_layers)
        if predicted is not None and record.runs_whole:
            self.speeds.measured(
                measured.server_id,
                planned_speed=record.speeds.get(measured.server_id, 1.0),
                predicted_seconds=predicted,
                measured_seconds=sum(sum(busy_seconds(measured, phase)) for phase in record.phases),
            )

    def _check_manifest(self, rank: int, manifest: RankManifest) -> None:
        if manifest.rank != rank:
            raise InvalidRequestError(
                f"a manifest of rank {manifest.rank} came with the lease of rank {rank}"
            )
        if manifest.n_nano_batches != self.spec.n_nano_batches:
            raise InvalidRequestError(
                f"step {manifest.step} of rank {rank} has {manifest.n_nano_batches} "
                f"nano-batches; job {self.job_id} has {self.spec.n_nano_batches}"
            )

    def _differs(self, manifest: RankManifest) -> InvalidRequestError:
        return InvalidRequestError(
            f"rank {manifest.rank} has submitted another manifest for step {manifest.step} of job "
            f"{self.job_id}; a step is submitted once, or again after it failed"
        )


def _group_of(spec: JobSpec, groups: TensorParallelGroups, rank: int) -> Sequence[int]:
    """The ranks without which ``rank`` cannot run a step. Which ones form a pipeline with it is not
    known: all may."""
    return groups.group_of(rank) if spec.pipelining is None else range(spec.n_ranks)


def _is_begun(step: int, answers: Answers) -> bool:
    """Return whether a rank has run ticks of ``step`` under a plan that is not known here."""
    told = [steps[step] for steps in answers.values() if step in steps]
    return any(progress.done or any(progress.complete_ticks) for progress in told)
