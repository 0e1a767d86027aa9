"""Finds ranks that wait for each other, which no server and no deadline is to blame for.

A rank's training loop runs one tick after the other. If all its lanes wait, it sends nothing until
a reply comes, and a reply may need rows that another rank is still to send. Ranks that run their
nano-batches in different orders can therefore wait for each other forever. Pure state: the time
comes in, the verdict comes out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What a rank waits for.

    Attributes:
        step, nano_batch, tick: the tick that it has sent and has no reply of; ``tick`` is its place
            in its lane.
        sent_ticks: by nano-batch, how many ticks of the lane it has sent.
        needed_ranks: whose rows the reply needs.
    """

    step: int
    nano_batch: int
    tick: int
    sent_ticks: tuple[int, ...]
    needed_ranks: frozenset[int]

    def describe(self, n_layers: int) -> str:
        """The tick in words."""
        backward = self.tick >= n_layers
        layer = 2 * n_layers - 1 - self.tick if backward else self.tick
        phase = "backward" if backward else "forward"
        return f"layer {layer} {phase} of nano-batch {self.nano_batch}"


@dataclass
class _Told:
    """A wait, and the times at which the rank first and last said so."""

    wait: Wait
    first_at: float
    last_at: float


class Waits:
    """The waits of the ranks of a job with ``n_layers`` layers."""

    def __init__(self, n_layers: int) -> None:
        self._n_layers = n_layers
        self._told: dict[int, _Told] = {}

    def wait(self, rank: int, wait: Wait, *, now: float) -> str:
        """``rank`` says that it waits; the ranks that wait for each other, and for what, in words;
        empty if none do, as far as is known."""
        before = self._told.get(rank)
        if before is not None and before.wait == wait:
            before.last_at = now
        else:
            self._told[rank] = _Told(wait, now, now)
        for moment in sorted(told.first_at for told in self._told.values()):
            stuck = self._stuck_at(moment, wait.step)
            if stuck:
                return ", ".join(f"rank {r} for {self._describe(r)}" for r in sorted(stuck))
        return ""

    def forget(self, step: int) -> None:
        """``step`` is over, or was disturbed: what was said of it, and of those before, is void."""
        self._told = {rank: told for rank, told in self._told.items() if told.wait.step > step}

    def _describe(self, rank: int) -> str:
        return self._told[rank].wait.describe(self._n_layers)

    def _stuck_at(self, moment: float, step: int) -> set[int]:
        """The ranks that waited at ``moment``, each for rows that another one of them had not
        sent: none of them could go on."""
        stuck = {
            rank
            for rank, told in self._told.items()
            if told.wait.step == step and told.first_at <= moment <= told.last_at
        }
        while free := {rank for rank in stuck if not self._waits_for_any(rank, stuck)}:
            stuck -= free
        return stuck

    def _waits_for_any(self, rank: int, others: set[int]) -> bool:
        """Whether one of ``others`` has not sent what ``rank`` waits for."""
        wait = self._told[rank].wait
        return any(
            self._told[other].wait.sent_ticks[wait.nano_batch] <= wait.tick
            for other in wait.needed_ranks & others
        )
