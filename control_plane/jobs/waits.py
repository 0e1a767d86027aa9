"""Finds ranks that run their nano-batches in different orders, for which no server and no deadline
is to blame.

A rank's training loop runs one tick after the other. Of two ranks with the same order, one has
therefore sent, in every lane, at least what the other has. Where each is ahead of the other in one
lane their orders differ, and one that waits for the other's rows may do so forever: the other may
wait for it in a tick, or in a collective between them. What is known of a rank may be old: an
earlier state of the same order is behind, and never ahead. Pure state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distca.v1.jobs_pb2 import StepWaiting


class Waits:
    """The progress of a job's ranks, to find those that wait in vain."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, Sequence[int]]] = {}

    def has_sent(self, rank: int, step: int, sent_ticks: Sequence[int]) -> None:
        """``rank`` has sent so many ticks of each lane of ``step``."""
        self._sent[rank] = (step, sent_ticks)

    def wait(
        self, rank: int, step: int, wait: StepWaiting, has_rows: Callable[[int, int], bool]
    ) -> str:
        """``rank`` says that it waits in ``step``; the different orders of it and another rank, in
        words, or nothing.

        Args:
            has_rows: whether a rank has rows in a nano-batch: without, it sends none of its ticks.
        """
        self.has_sent(rank, step, wait.sent_ticks)
        for other in sorted(set(wait.needed_ranks)):
            its, sent = self._sent.get(other, (-1, ()))
            if its != step or sent[wait.nano_batch] > wait.tick:
                continue
            first = wait.nano_batch
            for second, (mine, theirs) in enumerate(zip(wait.sent_ticks, sent, strict=True)):
                if theirs > mine and has_rows(rank, second) and has_rows(other, second):
                    return (
                        f"rank {rank} runs nano-batch {first} before {second}, and rank {other} "
                        f"{second} before {first}"
                    )
        return ""
