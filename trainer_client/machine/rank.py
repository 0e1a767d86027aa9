"""A rank's steps, plans and recoveries: what happens, and what is to be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeAlias

from trainer_client.machine.events import (
    AllFinished,
    Cause,
    Connected,
    Event,
    HandedIn,
    Manifest,
    ManifestRefused,
    ManifestTaken,
    OwnServerPlanned,
    Plan,
    PlanCame,
    PlanOutline,
    RecoveryBegan,
    ReplayBroke,
    ReplaySent,
    RepliesExamined,
    RepliesHere,
    ServerFailed,
    ServersUnreachable,
    StepBegun,
    StepEnded,
    StepFailed,
    StillWaiting,
    TickBegun,
    TickUnderWay,
)
from trainer_client.machine.instructions import (
    AbandonOwnServer,
    CloseConnections,
    Connect,
    DeriveAhead,
    Instruction,
    LetGo,
    Note,
    PlanOwnServer,
    Progress,
    RecoverOwnServer,
    ReportGivenUp,
    ReportLost,
    ReportProgress,
)
from trainer_client.machine.lane import LaneMachine
from trainer_client.machine.lane_calls import LaneCalls
from trainer_client.machine.step import StepMachine

Instructions: TypeAlias = list[Instruction[Plan, Cause]]


@dataclass(eq=False)
class _Step(Generic[Manifest, Plan, Cause]):
    """What a rank knows of a step.

    Attributes:
        manifest: that was handed in; None once the step was refused.
        is_taken: the control plane has it.
        refusal: why it gets no plan, until that was told; empty if nothing speaks against it.
        outline: of its plan that counts; None if there is none.
        running: from its beginning on.
    """

    manifest: Manifest | None = None
    is_taken: bool = False
    refusal: str = ""
    outline: PlanOutline[Plan] | None = None
    running: StepMachine[Plan, Cause] | None = None


class RankMachine(Generic[Manifest, Plan, Cause]):
    """Decides what a rank does. Not thread-safe.

    Args:
        n_layers, n_nano_batches: of the job.
        own_layers: of this rank; fewer where ranks of a pipeline have unequally many.
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
        kept_forward_ticks: int | None = None,
    ) -> None:
        self.epoch = 0
        self.next_step = 0
        self._n_layers = n_layers
        self._own_layers = n_layers if own_layers is None else own_layers
        self._n_nano_batches = n_nano_batches
        self._recovery_timeout_seconds = recovery_timeout_seconds
        self._kept_forward_ticks = kept_forward_ticks
        self._steps: dict[int, _Step[Manifest, Plan, Cause]] = {}
        self._finished = -1
        # The answer to the recovery of this epoch; None until there is one.
        self._answer: ReportProgress | None = None

    @property
    def manifests(self) -> list[tuple[int, Manifest]]:
        """Of unfinished steps, in order: what the control plane may have to be told again."""
        return [
            (number, step.manifest)
            for number, step in sorted(self._steps.items())
            if step.manifest is not None
        ]

    def is_known(self, step: int) -> bool:
        """Whether ``step`` was handed in, and neither finished nor its refusal told."""
        known = self._steps.get(step)
        return known is not None and (known.manifest is not None or bool(known.refusal))

    def is_taken(self, step: int) -> bool:
        """Whether the control plane has the manifest of ``step``."""
        known = self._steps.get(step)
        return known is not None and known.is_taken

    def is_finished(self, step: int) -> bool:
        """Whether every rank has finished ``step`` and those before."""
        return step <= self._finished

    def is_over(self, epoch: int) -> bool:
        """Whether a later epoch than ``epoch`` has begun."""
        return epoch < self.epoch

    def take_refusal(self, step: int) -> str:
        """Why ``step`` gets no plan, told once; empty if nothing speaks against it."""
        known = self._steps.get(step)
        if known is None:
            return ""
        refusal, known.refusal = known.refusal, ""
        return refusal

    def outline_of(self, step: int) -> PlanOutline[Plan] | None:
        """Of the plan of ``step`` that counts; None if there is none yet, or it became void."""
        known = self._steps.get(step)
        return known.outline if known is not None else None

    def running(self, step: int) -> StepMachine[Plan, Cause] | None:
        """The step, if it has begun and not every rank has finished it."""
        known = self._steps.get(step)
        return known.running if known is not None else None

    def is_wanted(self, step: int, epoch: int) -> bool:
        """Whether connections for ``step`` under the plan of ``epoch`` are of any use."""
        running = self.running(step)
        return epoch == self.epoch and running is not None and running.may_be_asked

    def may_be_asked(self, last_step: int) -> bool:
        """Whether other ranks may still ask for rows of ``last_step`` or an earlier step."""
        return any(running.may_be_asked for running in self._running() if running.step <= last_step)

    def handle(self, event: Event[Manifest, Plan, Cause], now: float) -> Instructions[Plan, Cause]:
        """Takes in what has happened at ``now``, in seconds on any clock that never goes back;
        returns what is to be done."""
        match event:
            case TickBegun() | TickUnderWay() | RepliesHere() | RepliesExamined() | ServerFailed():
                return self._of_tick(event, now)
            case StillWaiting(step, can_be_planned):
                running = self.running(step)
                if running is not None:
                    running.still_waiting(
                        now, self._recovery_timeout_seconds, can_be_planned=can_be_planned
                    )
            case HandedIn(step, manifest):
                known = self._known(step)
                known.manifest, known.is_taken, known.refusal = manifest, False, ""
            case ManifestTaken(step):
                if step in self._steps:
                    self._steps[step].is_taken = True
            case ManifestRefused(step, why):
                self._refuse(step, why)
            case StepFailed(step, why):
                self._refuse(step, why)
                return self._fail(step, why)
            case ReplayBroke(step, why):
                self._fail(step, why)
                return self._after_replay(step, [])
            case PlanCame(outline):
                return self._plan_came(outline, now)
            case OwnServerPlanned(outline):
                return self._own_server_planned(outline)
            case StepBegun():
                return self._step_begun(event, now)
            case Connected(step, epoch):
                return self._connected(step, epoch, now)
            case ReplaySent(step, epoch):
                running = self.running(step)
                out = running.replay_sent(epoch, now) if running is not None else []
                return self._after_replay(step, out)
            case ServersUnreachable():
                return self._unreachable(event)
            case StepEnded(step, why):
                return self._step_ended(step, why)
            case AllFinished(step):
                return self._all_finished(step)
            case RecoveryBegan():
                return self._recovery_began(event, now)
        return []

    # Steps.

    def _known(self, step: int) -> _Step[Manifest, Plan, Cause]:
        return self._steps.setdefault(step, _Step())

    def _running(self) -> list[StepMachine[Plan, Cause]]:
        return [step.running for step in self._steps.values() if step.running is not None]

    def _refuse(self, number: int, why: str) -> None:
        """The step has no plan and will get none, unless it is handed in again."""
        step = self._steps.get(number)
        if step is not None and step.manifest is not None:
            step.manifest, step.is_taken, step.outline, step.refusal = None, False, None, why

    def _fail(self, step: int, why: str) -> Instructions[Plan, Cause]:
        running = self.running(step)
        if running is not None:
            running.fail(why)
        return []

    def _step_begun(self, event: StepBegun, now: float) -> Instructions[Plan, Cause]:
        left_out = [
            number
            for number, step in sorted(self._steps.items())
            if self.next_step <= number < event.step and step.running is None
        ]
        self.next_step = event.step
        lanes = [self._lane(event, nano_batch) for nano_batch in range(self._n_nano_batches)]
        begun = self._known(event.step)
        begun.running = StepMachine(event.step, lanes, n_layers=self._n_layers, now=now)
        out: Instructions[Plan, Cause] = []
        if left_out:
            out += self._go_on_with(event.step, f"steps {left_out} left out")
        return out + self._connect(begun)

    def _lane(self, event: StepBegun, nano_batch: int) -> LaneMachine:
        calls = LaneCalls(
            f"step {event.step} nano-batch {nano_batch}",
            self._own_layers,
            forward_only=event.forward_only,
            first_layer=self._n_layers - self._own_layers,
        )
        return LaneMachine(
            event.lanes[nano_batch],
            calls,
            n_ticks=self._n_layers * (1 if event.forward_only else 2),
            end=self._n_layers + (0 if event.forward_only else self._own_layers),
            kept_forward_ticks=self._kept_forward_ticks,
        )

    def _step_ended(self, step: int, why: str) -> Instructions[Plan, Cause]:
        running = self.running(step)
        if running is None:
            return []
        running.closed = True
        if running.is_complete:
            if self.is_finished(step):
                del self._steps[step]
            elif running.may_be_asked:
                return []
            return running.release()
        # Others may wait for this rank's rows of the step: they are told that none will come.
        return [
            *running.abandon(),
            *self._go_on_with(step + 1, f"step {step} was not run to its end"),
            ReportGivenUp(step, why),
        ]

    def _go_on_with(self, step: int, why: str) -> Instructions[Plan, Cause]:
        """Servers expect ticks that will not come: new connections tell them where to go on. Under
        another plan than the step's first, they may be other servers than it names."""
        return [CloseConnections(why), AbandonOwnServer(step)]

    def _all_finished(self, step: int) -> Instructions[Plan, Cause]:
        self._finished = max(self._finished, step)
        self.next_step = max(self.next_step, step + 1)
        out: Instructions[Plan, Cause] = []
        for number in [number for number in sorted(self._steps) if number <= step]:
            running = self._steps[number].running
            # Its block may still run.
            if running is None or running.closed:
                del self._steps[number]
                out += running.release() if running is not None else []
        return out

    # Plans.

    def _plan_came(self, outline: PlanOutline[Plan], now: float) -> Instructions[Plan, Cause]:
        if not self._counts(outline):
            return []
        void: Instructions[Plan, Cause] = []
        if outline.epoch > self.epoch:
            # Of a recovery that this rank has not heard of.
            void = self._void(outline.epoch, f"a plan of epoch {outline.epoch}", now)
        return [*void, PlanOwnServer(outline)]

    def _own_server_planned(self, outline: PlanOutline[Plan]) -> Instructions[Plan, Cause]:
        if not self._counts(outline):
            return []
        step = self._known(outline.step)
        step.outline = outline
        return [DeriveAhead(outline.plan)] if step.running is None else self._connect(step)

    def _counts(self, outline: PlanOutline[Plan]) -> bool:
        """Whether a plan that came is neither void nor as old as the one that is there."""
        before = self.outline_of(outline.step)
        return (
            outline.epoch >= self.epoch
            and not self.is_finished(outline.step)
            and (before is None or before.epoch < outline.epoch)
        )

    def _connect(self, step: _Step[Manifest, Plan, Cause]) -> Instructions[Plan, Cause]:
        outline, running = step.outline, step.running
        if outline is None or running is None or not running.may_be_asked:
            return []
        # On a connection, a server takes nothing of steps before its first.
        waiting = [other.step for other in self._running() if other.awaits_plan]
        first_step = min([*waiting, outline.step])
        return [Connect(outline.step, outline.epoch, outline.plan, first_step)]

    def _connected(self, step: int, epoch: int, now: float) -> Instructions[Plan, Cause]:
        running, outline = self.running(step), self.outline_of(step)
        if running is None or outline is None or outline.epoch != epoch:
            return []
        return self._after_replay(step, running.enter_plan(outline, now))

    def _after_replay(self, step: int, out: Instructions[Plan, Cause]) -> Instructions[Plan, Cause]:
        """If rows could not be sent again, the loop hears of it in its next wait. If none is to
        come, the ranks that need them do."""
        running = self.running(step)
        if running is None or not (running.failure and running.is_complete):
            return out
        if not running.may_be_asked:
            return out
        return [*out, *running.abandon(), ReportGivenUp(step, running.failure)]

    def _unreachable(self, event: ServersUnreachable[Cause]) -> Instructions[Plan, Cause]:
        running = self.running(event.step)
        if running is None or self.is_over(event.epoch):
            return []
        causes = [f"server {name} cannot be reached: {why}" for name, why in event.details.items()]
        running.trouble = "; ".join(causes)
        return [
            ReportLost(
                name,
                event.epoch,
                event.cause,
                f"step {event.step}: cannot be reached: {why}",
            )
            for name, why in event.details.items()
        ]

    # Recoveries.

    def _recovery_began(self, event: RecoveryBegan, now: float) -> Instructions[Plan, Cause]:
        if self.is_over(event.epoch):
            return []
        if event.epoch == self.epoch and self._answer is not None:
            return [self._answer]
        without = f"; without {', '.join(event.lost)}" if event.lost else ""
        why = f"recovery with epoch {event.epoch}: {event.why}"
        # In this order: nothing may be sent by the old plan once the control plane has the answer.
        out = self._void(event.epoch, why, now)
        self._answer = ReportProgress(event.epoch, self._progress())
        return [
            Note(f"{why}{without}", is_warning=True),
            *out,
            RecoverOwnServer(event.epoch),
            self._answer,
        ]

    def _void(self, epoch: int, why: str, now: float) -> Instructions[Plan, Cause]:
        """Plans and connections of epochs below ``epoch`` are void."""
        self.epoch, self._answer = epoch, None
        for step in self._steps.values():
            if step.outline is not None and step.outline.epoch < epoch:
                step.outline = None
        left = [each for running in self._running() for each in running.leave_plan(why, now)]
        return [*left, CloseConnections(why)]

    def _progress(self) -> tuple[Progress, ...]:
        """Of all steps that every rank has not finished; those that were left out are done."""
        none = (0,) * self._n_nano_batches
        return tuple(
            step.running.progress
            if step.running is not None
            else Progress(number, none, done=number < self.next_step)
            for number, step in sorted(self._steps.items())
            if step.running is not None or step.manifest is not None
        )

    # Ticks.

    def _of_tick(
        self,
        event: TickBegun | TickUnderWay | RepliesHere | RepliesExamined | ServerFailed[Cause],
        now: float,
    ) -> Instructions[Plan, Cause]:
        running = self.running(event.tick.step)
        if running is None or running.abandoned:
            return [] if isinstance(event, TickBegun) else [LetGo(event.tick, event.epoch)]
        match event:
            case TickBegun(tick):
                return running.begin(tick)
            case TickUnderWay(tick, epoch):
                return running.under_way(tick, epoch)
            case RepliesHere(tick, epoch):
                return running.replies_here(tick, epoch)
            case RepliesExamined(tick, epoch):
                return running.examined(tick, epoch)
            case ServerFailed(tick, epoch, server_id, cause, detail):
                lost = ReportLost(server_id, epoch, cause, f"{tick}: {detail}")
                return running.server_failed(tick, epoch, lost, now)
