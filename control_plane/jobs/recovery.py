"""The epochs of one job, and its recovery: who has answered, and what is to be done then.

Pure state: the time comes in, decisions come out; see docs/fault_tolerance.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distca.v1.jobs_pb2 import StepProgress

Answers = Mapping[int, Mapping[int, StepProgress]]
"""The progress by rank, then by step."""


class JobRecovery:
    """The epochs and recoveries of one job, one after the other.

    Args:
        first_epoch: of the plans before any recovery.

    Attributes:
        epoch: of the plans that count, or will count when the recovery that runs is over.
        began: whether there was any recovery.
        runs: whether one is under way.
        began_at: when it began.
        lost, reasons: the servers that it began for, and why.
        fruitless: recoveries in a row since a rank completed a tick, not counting those that first
            reported a server's loss: these end, at home at the latest.
        in_vain: their reasons, each once. What comes last may only be a consequence.
    """

    def __init__(self, first_epoch: int = 0) -> None:
        self.epoch = first_epoch
        self.began = False
        self.runs = False
        self.began_at = 0.0
        self.lost: list[str] = []
        self.reasons: list[str] = []
        self.fruitless = 0
        self.in_vain: list[str] = []
        self._due: dict[str, str] = {}
        self._answers: dict[int, dict[int, StepProgress]] = {}
        self._complete_before: dict[tuple[int, int], int] = {}
        self._lost_in_vain: set[str] = set()

    @property
    def is_due(self) -> bool:
        """Return whether something happened that the next recovery is for."""
        return bool(self._due)

    def call_for(self, reason: str, server_id: str = "") -> bool:
        """Something happened that needs a recovery, such as the loss of a server; returns whether
        it is the first since the last one began."""
        first = not self._due
        self._due.setdefault(server_id, reason)
        return first

    def raise_epoch(self, epoch: int) -> None:
        """A rank has seen ``epoch``: plans made from now on have no lower one."""
        self.epoch = max(self.epoch, epoch)

    def begin(self, *, now: float) -> None:
        """Begins the recovery that was called for, in a new epoch. One that runs starts over, for
        the servers lost before too."""
        lost = sorted(server_id for server_id in self._due if server_id)
        reasons = list(self._due.values())
        if self.runs:
            lost = sorted({*self.lost, *lost})
            reasons = [*self.reasons, *reasons]
        self.lost, self.reasons = lost, reasons
        if self._lost_in_vain.issuperset(lost):
            self.fruitless += 1
            self.in_vain += [reason for reason in reasons if reason not in self.in_vain]
        self._lost_in_vain.update(lost)
        self.epoch += 1
        self.began = self.runs = True
        self.began_at = now
        self._due = {}
        self._answers = {}

    def answer(self, rank: int, epoch: int, steps: Iterable[StepProgress]) -> bool:
        """Take in a rank's progress; False if it answers a recovery that is over."""
        if not self.runs or epoch != self.epoch:
            return False
        self._answers[rank] = {progress.step: progress for progress in steps}
        return True

    def has_answered(self, rank: int) -> bool:
        """Return whether the recovery that runs needs nothing more of ``rank``."""
        return rank in self._answers

    def missing(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` that have not answered."""
        return [rank for rank in ranks if rank not in self._answers]

    def end(self) -> Answers:
        """End the recovery; returns the ranks' answers. Plans of its epoch follow."""
        self.runs = False
        complete = {
            (rank, step): sum(progress.complete_ticks)
            for rank, steps in self._answers.items()
            for step, progress in steps.items()
        }
        if any(ticks > self._complete_before.get(key, 0) for key, ticks in complete.items()):
            self.progressed()
        self._complete_before = complete
        return self._answers

    def progressed(self) -> None:
        """A rank has completed ticks since the last recovery."""
        self.fruitless = 0
        self.in_vain = []
        self._lost_in_vain = set()


def is_finished(step: int, answers: Answers) -> bool:
    """Return whether no rank needs ``step`` any more: every rank that still knows it has left it
    behind. A rank forgets a step when all have finished it."""
    told = [steps[step] for steps in answers.values() if step in steps]
    return bool(told) and all(progress.done for progress in told)
