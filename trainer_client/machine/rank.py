"""A rank's steps, plans and recoveries: each method takes in what has happened, and returns what is
to be done. What happens to a tick goes to its step: :meth:`RankMachine.running`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias

from trainer_client.machine.instructions import (
    AbandonOwnServer,
    CloseConnections,
    Connect,
    DeriveAhead,
    Instruction,
    PlanOwnServer,
    Progress,
    RecoverOwnServer,
    ReportGivenUp,
    ReportLost,
    ReportProgress,
)
from trainer_client.machine.lane import LaneMachine
from trainer_client.machine.lane_calls import LaneCalls
from trainer_client.machine.outlines import Cause, LaneOutline, Manifest, Plan, PlanOutline
from trainer_client.machine.step import StepMachine

Instructions: TypeAlias = list[Instruction[Plan, Cause]]


@dataclass(eq=False)
class _Step(Generic[Manifest, Plan, Cause]):
    """A step, as far as a rank knows it.

    Attributes:
        manifest: that was handed in; None once the step was refused, or if the rank has not joined
            it.
        sequence: which hand-in it was, if it was handed in without a number; else 0.
        refusal: why it gets no plan, until that was read; empty if nothing speaks against it.
        outline: of its plan that counts; None if there is none.
        running: from its beginning on.
    """

    manifest: Manifest | None = None
    sequence: int = 0
    refusal: str = ""
    outline: PlanOutline[Plan] | None = None
    running: StepMachine[Plan, Cause] | None = None


class RankMachine(Generic[Manifest, Plan, Cause]):
    """Decides what a rank does. Not thread-safe. Times are seconds on any clock that never goes
    back.

    Args:
        n_layers: calls in one forward.
        n_nano_batches: of the job.
        own_layers: of this rank; fewer where ranks of a pipeline have unequally many.
        head_groups: ticks of a call.
        recovery_timeout_seconds: how long a step may be without a plan.
        kept_forward_ticks: see :class:`trainer_client.machine.lane.LaneMachine`.

    Attributes:
        epoch: the highest seen, of a plan or a recovery; what is of lower ones is void.
        next_step: steps before it have been begun or left out; it may have been begun itself.
    """

    def __init__(
        self,
        n_layers: int,
        n_nano_batches: int,
        *,
        recovery_timeout_seconds: float,
        own_layers: int | None = None,
        head_groups: int = 1,
        kept_forward_ticks: int | None = None,
    ) -> None:
        self.epoch = 0
        self.next_step = 0
        self._n_layers = n_layers
        self._head_groups = head_groups
        self._own_layers = n_layers if own_layers is None else own_layers
        self._n_nano_batches = n_nano_batches
        self._recovery_timeout_seconds = recovery_timeout_seconds
        self._kept_forward_ticks = kept_forward_ticks
        self._steps: dict[int, _Step[Manifest, Plan, Cause]] = {}
        # By sequence: handed in, without a number so far.
        self._joining: dict[int, _Step[Manifest, Plan, Cause]] = {}
        self._finished = -1
        # The answer to the recovery of this epoch; None until there is one.
        self._answer: ReportProgress | None = None

    @property
    def manifests(self) -> list[Manifest]:
        """The manifests of unfinished steps, in order, which the control plane may have to get
        again; of those without a number the last. Those that were joined and run at home concern
        nobody else."""
        numbered = [
            step
            for _, step in sorted(self._steps.items())
            if not (step.sequence and step.running is not None and step.running.at_home)
        ]
        joining = [step for _, step in sorted(self._joining.items())]
        steps = [*numbered, *joining[-1:]]
        return [step.manifest for step in steps if step.manifest is not None]

    @property
    def first_unknown(self) -> int:
        """The number after all steps that the rank knows of, its own and others'."""
        return max([self.next_step - 1, self._finished, *self._steps]) + 1

    def is_known(self, step: int) -> bool:
        """Return whether ``step`` was handed in, and neither finished nor its refusal read."""
        known = self._steps.get(step)
        return known is not None and (known.manifest is not None or bool(known.refusal))

    def manifest_of(self, step: int) -> Manifest | None:
        """The manifest of a step; None if it was refused, or is not known."""
        known = self._steps.get(step)
        return None if known is None else known.manifest

    def number_of(self, sequence: int) -> int | None:
        """The number of a hand-in; None if it has none yet."""
        return next((n for n, step in self._steps.items() if step.sequence == sequence), None)

    def void_before(self, sequence: int) -> list[int]:
        """The steps of hand-ins before ``sequence`` that were not begun, in order."""
        return [
            number
            for number, step in sorted(self._steps.items())
            if 0 < step.sequence < sequence and step.running is None
        ]

    def is_finished(self, step: int) -> bool:
        """Return whether every rank has finished ``step`` and those before."""
        return step <= self._finished

    def is_over(self, epoch: int) -> bool:
        """Return whether a later epoch than ``epoch`` has begun."""
        return epoch < self.epoch

    def take_refusal(self, step: int) -> str:
        """The reason why ``step`` gets no plan, given once; empty if nothing speaks against it."""
        known = self._steps.get(step)
        if known is None:
            return ""
        refusal, known.refusal = known.refusal, ""
        return refusal

    def outline_of(self, step: int) -> PlanOutline[Plan] | None:
        """The outline of the plan of ``step`` that counts; None if there is none yet, or it became
        void."""
        known = self._steps.get(step)
        return known.outline if known is not None else None

    def running(self, step: int) -> StepMachine[Plan, Cause] | None:
        """The step, if it has begun and not every rank has finished it."""
        known = self._steps.get(step)
        return known.running if known is not None else None

    def is_wanted(self, step: int, epoch: int) -> bool:
        """Return whether connections for ``step`` under the plan of ``epoch`` are of any use."""
        running = self.running(step)
        if running is None or running.at_home:
            return False
        return epoch == self.epoch and running.may_be_asked

    def may_be_asked(self, last_step: int) -> bool:
        """Return whether other ranks may still ask for rows of ``last_step`` or an earlier step."""
        return any(running.may_be_asked for running in self._running() if running.step <= last_step)

    # Steps.

    def hand_in(self, number: int, manifest: Manifest) -> None:
        """The training loop has submitted a step."""
        step = self._known(number)
        step.manifest, step.refusal = manifest, ""

    def join(self, sequence: int, manifest: Manifest) -> None:
        """The training loop has handed in a step without a number."""
        self._joining[sequence] = _Step(manifest)

    def begins(self, sequence: int, manifest: Manifest) -> None:
        """The forward of a hand-in without a number begins, which its manifest says from now on."""
        if sequence in self._joining:
            self._joining[sequence].manifest = manifest

    def joining(self, sequence: int) -> Manifest | None:
        """The manifest of a hand-in without a number; None if it has one, or is void."""
        step = self._joining.get(sequence)
        return None if step is None else step.manifest

    def numbered(self, sequence: int, number: int, manifest: Manifest) -> None:
        """A hand-in has got a number, and ``manifest`` with it. Those before that have none were
        void when this one came."""
        self._joining = {other: step for other, step in self._joining.items() if other > sequence}
        step = self._known(number)
        step.manifest, step.sequence = manifest, sequence

    def numbered_late(self, sequence: int, number: int) -> None:
        """The control plane has numbered a hand-in that was void, or ran at home under another
        number: see :meth:`void_before`."""
        if number not in self._steps and number > self._finished:
            self._steps[number] = _Step(sequence=sequence)

    def refuse_hand_in(self, sequence: int, why: str) -> Instructions[Plan, Cause]:
        """A hand-in gets no plan."""
        if sequence in self._joining:
            self._joining[sequence] = _Step(refusal=why)
        return []

    def take_refused_hand_in(self, sequence: int) -> str:
        """The reason why a hand-in gets no plan; empty if nothing speaks against it."""
        step = self._joining.get(sequence)
        return "" if step is None else step.refusal

    def refuse(self, number: int, why: str) -> Instructions[Plan, Cause]:
        """The step has no plan and will get none, unless it is handed in again."""
        step = self._steps.get(number)
        if step is not None and step.manifest is not None:
            step.manifest, step.outline, step.refusal = None, None, why
        return []

    def step_failed(self, step: int, why: str) -> Instructions[Plan, Cause]:
        """A step gets no plan any more."""
        self._fail(step, why)
        return self.refuse(step, why)

    def _known(self, step: int) -> _Step[Manifest, Plan, Cause]:
        return self._steps.setdefault(step, _Step())

    def _running(self) -> list[StepMachine[Plan, Cause]]:
        return [step.running for step in self._steps.values() if step.running is not None]

    def _fail(self, step: int, why: str) -> None:
        running = self.running(step)
        if running is not None:
            running.fail(why)

    def begin_step(
        self, number: int, outlines: Sequence[LaneOutline], *, forward_only: bool, now: float
    ) -> Instructions[Plan, Cause]:
        """The training loop begins a step that has a plan."""
        left_out = [
            other
            for other, step in sorted(self._steps.items())
            if self.next_step <= other < number
            and step.manifest is not None
            and step.running is None
        ]
        # One that is late may come after a step that was numbered at home.
        self.next_step = max(self.next_step, number)
        lanes = [
            self._lane(f"step {number} nano-batch {nano_batch}", outline, forward_only=forward_only)
            for nano_batch, outline in enumerate(outlines)
        ]
        begun = self._known(number)
        begun.running = StepMachine(
            number,
            lanes,
            n_layers=self._n_layers * self._head_groups,
            patience_seconds=self._recovery_timeout_seconds,
            now=now,
        )
        out: Instructions[Plan, Cause] = []
        if left_out:
            out += self._go_on_with(number, f"steps {left_out} left out")
        return out + self._connect(begun)

    def _lane(self, where: str, outline: LaneOutline, *, forward_only: bool) -> LaneMachine:
        calls = LaneCalls(
            where,
            self._own_layers,
            forward_only=forward_only,
            first_layer=self._n_layers - self._own_layers,
            head_groups=self._head_groups,
        )
        end = self._n_layers + (0 if forward_only else self._own_layers)
        return LaneMachine(
            outline,
            calls,
            n_ticks=self._n_layers * self._head_groups * (1 if forward_only else 2),
            end=end * self._head_groups,
            kept_forward_ticks=self._kept_forward_ticks,
        )

    def go_home(self, number: int, now: float) -> Instructions[Plan, Cause]:
        """This rank computes the rest of a step itself. Servers of its plan do not wait for it,
        whether or not it has come to run under that."""
        step = self._known(number)
        assert step.running is not None
        return [*step.running.go_home(now), *self._connect(step)]

    def end_step(self, step: int, why: str) -> Instructions[Plan, Cause]:
        """The step's block has ended; ``why``, if it was not run to its end."""
        running = self.running(step)
        if running is None:
            return []
        running.closed = True
        if running.is_complete:
            if self.is_finished(step):
                del self._steps[step]
                return running.forget()
            return [] if running.may_be_asked else running.release()
        # Others may wait for this rank's rows of the step: they are told that none will come.
        return [
            *running.abandon(),
            *self._go_on_with(step + 1, f"step {step} was not run to its end"),
            ReportGivenUp(step, why),
        ]

    def _go_on_with(self, step: int, why: str) -> Instructions[Plan, Cause]:
        """Servers expect ticks that will not come: new connections say where to go on. Under
        another plan than the step's first, they may be other servers than it names."""
        return [CloseConnections(why), AbandonOwnServer(step)]

    def all_finished(self, step: int) -> Instructions[Plan, Cause]:
        """Every rank has finished ``step`` and those before."""
        self._finished = max(self._finished, step)
        self.next_step = max(self.next_step, step + 1)
        out: Instructions[Plan, Cause] = []
        for number in [number for number in sorted(self._steps) if number <= step]:
            running = self._steps[number].running
            # Its block may still run.
            if running is None or running.closed:
                del self._steps[number]
                out += running.forget() if running is not None else []
        return out

    # Plans.

    def plan_came(self, outline: PlanOutline[Plan], now: float) -> Instructions[Plan, Cause]:
        """A plan has come, perhaps again, for a step to come or for one that runs."""
        if not self._counts(outline):
            return []
        void: Instructions[Plan, Cause] = []
        if outline.epoch > self.epoch:
            # Of a recovery that this rank has not heard of.
            void = self._void(outline.epoch, f"a plan of epoch {outline.epoch}", now)
        return [*void, PlanOwnServer(outline)]

    def own_server_planned(self, outline: PlanOutline[Plan]) -> Instructions[Plan, Cause]:
        """This process's own server has a plan, so that steps may run under it."""
        if not self._counts(outline):
            return []
        step = self._known(outline.step)
        step.outline = outline
        if step.running is not None:
            return self._connect(step)
        return [DeriveAhead(outline.plan)] if step.manifest is not None else []

    def _counts(self, outline: PlanOutline[Plan]) -> bool:
        """Return whether a plan that came is neither void nor as old as the one that is there."""
        before = self.outline_of(outline.step)
        return (
            outline.epoch >= self.epoch
            and not self.is_finished(outline.step)
            and (before is None or before.epoch < outline.epoch)
        )

    def _connect(self, step: _Step[Manifest, Plan, Cause]) -> Instructions[Plan, Cause]:
        outline, running = step.outline, step.running
        if outline is not None and running is not None and running.at_home:
            return running.take_no_part(outline.epoch)
        if outline is None or running is None or not running.may_be_asked:
            return []
        # On a connection, a server takes nothing of steps before its first.
        waiting = [other.step for other in self._running() if other.awaits_plan]
        first_step = min([*waiting, outline.step])
        return [Connect(outline.step, outline.epoch, outline.plan, first_step)]

    def connected(self, step: int, epoch: int, now: float) -> Instructions[Plan, Cause]:
        """There are connections to all servers of a plan."""
        running, outline = self.running(step), self.outline_of(step)
        if running is None or outline is None or outline.epoch != epoch:
            return []
        return self._after_replay(step, running.enter_plan(outline, now))

    def replay_sent(self, step: int, epoch: int, now: float) -> Instructions[Plan, Cause]:
        """The ticks that ``ReportReplay`` came behind have been sent."""
        running = self.running(step)
        out = running.replay_sent(epoch, now) if running is not None else []
        return self._after_replay(step, out)

    def replay_broke(self, step: int, why: str) -> Instructions[Plan, Cause]:
        """Something that nobody thought of has kept a plan from coming into force."""
        self._fail(step, why)
        return self._after_replay(step, [])

    def _after_replay(self, step: int, out: Instructions[Plan, Cause]) -> Instructions[Plan, Cause]:
        """If rows could not be sent again, the loop learns it in its next wait. If none is to
        come, the ranks that need them do."""
        running = self.running(step)
        if running is None or not (running.failure and running.is_complete):
            return out
        if not running.may_be_asked:
            return out
        return [*out, *running.abandon(), ReportGivenUp(step, running.failure)]

    def unreachable(
        self, step: int, epoch: int, cause: Cause, details: Mapping[str, str]
    ) -> Instructions[Plan, Cause]:
        """Some servers of a plan cannot be connected to: why, by server."""
        running = self.running(step)
        if running is None or self.is_over(epoch):
            return []
        causes = [f"server {name} cannot be reached: {why}" for name, why in details.items()]
        running.trouble = "; ".join(causes)
        return [
            ReportLost(name, epoch, cause, f"step {step}: cannot be reached: {why}")
            for name, why in details.items()
        ]

    # Recoveries.

    def recover(
        self, epoch: int, lost: Sequence[str], why: str, now: float
    ) -> Instructions[Plan, Cause]:
        """Plans of epochs below ``epoch`` are void, and the rank is asked how far it is; perhaps
        again."""
        if self.is_over(epoch):
            return []
        if epoch == self.epoch and self._answer is not None:
            return [self._answer]
        without = f"; without {', '.join(lost)}" if lost else ""
        why = f"recovery with epoch {epoch}: {why}"
        # In this order: nothing may be sent by the old plan once the control plane has the answer.
        out = self._void(epoch, why, now)
        self._answer = ReportProgress(epoch, self._progress())
        return [*out, RecoverOwnServer(epoch, f"{why}{without}"), self._answer]

    def _void(self, epoch: int, why: str, now: float) -> Instructions[Plan, Cause]:
        """Plans and connections of epochs below ``epoch`` are void."""
        self.epoch, self._answer = epoch, None
        for step in self._steps.values():
            if step.outline is not None and step.outline.epoch < epoch:
                step.outline = None
        left = [each for running in self._running() for each in running.leave_plan(why, now)]
        return [*left, CloseConnections(why)]

    def _progress(self) -> tuple[Progress, ...]:
        """The progress in all steps that not every rank has finished; those that were left out are
        done."""
        none = (0,) * self._n_nano_batches
        return tuple(
            step.running.progress
            if step.running is not None
            else Progress(number, none, done=number < self.next_step)
            for number, step in sorted(self._steps.items())
            if step.running is not None or step.manifest is not None
        )
