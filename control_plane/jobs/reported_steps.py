"""The steps of a job that each of its ranks has reported."""

from __future__ import annotations

from collections.abc import Collection


class ReportedSteps:
    """The last step that each rank has reported, as it has those before.

    Steps that the control plane numbers have some of the ranks: the others need not report them.

    Args:
        n_ranks: of the job.
    """

    def __init__(self, n_ranks: int) -> None:
        self._last = [-1] * n_ranks
        # By rank: the steps that it has joined and not reported.
        self._due: list[set[int]] = [set() for _ in range(n_ranks)]
        self._newest_joined = -1

    def last(self, rank: int) -> int:
        """``rank`` has nothing to report of the steps up to this one."""
        due = self._due[rank]
        if due:
            return min(due) - 1
        return max(self._last[rank], self._newest_joined)

    def reported(self, rank: int, step: int) -> None:
        """``rank`` has finished ``step`` and those before, or given them up."""
        self._last[rank] = max(self._last[rank], step)
        self._due[rank] = {due for due in self._due[rank] if due > step}

    def joined(self, step: int, ranks: Collection[int]) -> None:
        """``ranks`` alone run ``step``."""
        self._newest_joined = max(self._newest_joined, step)
        for rank in ranks:
            if step > self._last[rank]:
                self._due[rank].add(step)

    def failed(self, step: int) -> None:
        """Nobody runs ``step``."""
        for due in self._due:
            due.discard(step)
