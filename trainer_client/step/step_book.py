"""What a rank knows of the steps it has handed in: manifests, plans, refusals. Pure state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core_attention.arrays import Int64Array
from core_attention.plan import Plan
from distca.v1 import jobs_pb2, plan_pb2


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step's plan as this rank needs it.

    Attributes:
        plan: the rank's slice.
        forward_only: the step has no backward pass.
        first_tick: ``[n_documents]`` of the slice: the first tick of the document's lane that runs
            under this plan; earlier ones are complete on every rank with rows of the document.
    """

    plan: Plan
    forward_only: bool
    first_tick: Int64Array


@dataclass(frozen=True, eq=False)
class HandedIn:
    """A manifest that the control plane may ask for again."""

    manifest: plan_pb2.RankManifest
    forward_only: bool


class StepBook:
    """The steps of one rank, from handing in a manifest until every rank has finished the step.

    Args:
        n_nano_batches: of every step.

    Attributes:
        epoch: the highest seen, of a plan or a recovery; plans of lower ones are void.
        reported: the answer to the recovery of ``epoch``; None until there is one.
    """

    def __init__(self, n_nano_batches: int) -> None:
        self._n_nano_batches = n_nano_batches
        self.epoch = 0
        self.reported: list[jobs_pb2.StepProgress] | None = None
        self._handed_in: dict[int, HandedIn] = {}
        self._taken: set[int] = set()
        self._plans: dict[int, PlannedStep] = {}
        self._refused: dict[int, str] = {}
        # Steps before it have been begun or left out. The one begun last may not be listed yet.
        self._next_step = 0
        self._finished = -1

    def hand_in(self, step: int, handed_in: HandedIn) -> None:
        """The rank hands in a step, for the first time or after it was refused."""
        self._refused.pop(step, None)
        self._taken.discard(step)
        self._handed_in[step] = handed_in

    def handed_in(self) -> list[tuple[int, HandedIn]]:
        """The steps that the control plane may have to be told again, in order."""
        return sorted(self._handed_in.items(), key=lambda item: item[0])

    def manifest_taken(self, step: int) -> None:
        """The control plane has the manifest of ``step``."""
        self._taken.add(step)

    def is_taken(self, step: int) -> bool:
        """Whether the control plane has the manifest of ``step``."""
        return step in self._taken

    def refuse(self, step: int, why: str) -> None:
        """``step`` has no plan and will get none, unless it is handed in again."""
        if step in self._handed_in:
            self._forget(step)
            self._refused[step] = why

    def take_refusal(self, step: int) -> str | None:
        """Why ``step`` gets no plan, told once; None if nothing speaks against it."""
        return self._refused.pop(step, None)

    def is_known(self, step: int) -> bool:
        """Whether ``step`` was handed in, and neither finished nor its refusal told."""
        return step in self._handed_in or step in self._refused

    def counts(self, planned: PlannedStep) -> bool:
        """Whether a plan that came is neither void nor as old as the one that is there."""
        epoch, known = planned.plan.epoch, self._plans.get(planned.plan.step)
        return epoch >= self.epoch and (known is None or known.plan.epoch < epoch)

    def plan(self, planned: PlannedStep) -> None:
        """Takes in a plan that counts."""
        self.epoch = planned.plan.epoch
        self._plans[planned.plan.step] = planned

    def plan_of(self, step: int) -> PlannedStep | None:
        """The plan of ``step`` that counts; None if there is none yet, or it became void."""
        return self._plans.get(step)

    def begin(self, step: int) -> None:
        """The rank begins ``step``; earlier ones that it has not begun are left out."""
        self._next_step = max(self._next_step, step)

    @property
    def next_step(self) -> int:
        """Steps before it have been begun or left out."""
        return self._next_step

    def is_over(self, epoch: int) -> bool:
        """Whether a later epoch than ``epoch`` has begun."""
        return epoch < self.epoch

    def recover(self, epoch: int) -> None:
        """A recovery has begun: all plans of lower epochs are void."""
        self.epoch = epoch
        self.reported = None
        for step in [s for s, planned in self._plans.items() if planned.plan.epoch < epoch]:
            del self._plans[step]

    def answer(self, listed: Sequence[jobs_pb2.StepProgress]) -> list[jobs_pb2.StepProgress]:
        """What the rank tells in answer to the recovery: its running and retained steps
        ``listed``, those that it left out as done, and those not begun yet."""
        known = {progress.step for progress in listed}
        others = [
            jobs_pb2.StepProgress(
                step=step,
                complete_ticks=[0] * self._n_nano_batches,
                done=step < self._next_step,
            )
            for step in sorted(self._handed_in)
            if step not in known
        ]
        self.reported = [*listed, *others]
        return self.reported

    def finish(self, step: int) -> None:
        """Every rank has finished ``step`` and those before."""
        self._finished = max(self._finished, step)
        self._next_step = max(self._next_step, step + 1)
        for number in [s for s in {*self._handed_in, *self._refused} if s <= step]:
            self._forget(number)
            self._refused.pop(number, None)

    def is_finished(self, step: int) -> bool:
        """Whether every rank has finished ``step`` and those before."""
        return step <= self._finished

    def _forget(self, step: int) -> None:
        self._handed_in.pop(step, None)
        self._taken.discard(step)
        self._plans.pop(step, None)
