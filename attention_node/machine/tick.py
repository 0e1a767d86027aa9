"""One tick on one server: which ranks' rows are here, which parts may run, which replies are due.

From its first rows on a tick belongs to one thread, the executor's, which need not ask the server.
"""

from __future__ import annotations

from collections.abc import Set

from attention_node.machine.outline import TickOutline
from core_attention.tick import Tick


class TickMachine:
    """Follows a tick from its first rows to its last reply.

    Args:
        tick: which exchange.
        outline: what belongs to it.

    Attributes:
        arrived: the ranks whose rows are here.
        unreplied: the ranks that are still to get a reply.
        undone: the parts that have not run.
        closed: it is over: complete, or given up.
        failure: why it was given up, or None.
    """

    def __init__(self, tick: Tick, outline: TickOutline) -> None:
        self.tick = tick
        self.arrived: set[int] = set()
        self.unreplied = set(outline.before_reply)
        self.closed = False
        self.failure: BaseException | None = None
        self._outline = outline
        self._left: set[int] = set()
        self._awaiting = set(range(len(outline.needs)))
        self.undone = set(self._awaiting)

    @property
    def is_complete(self) -> bool:
        """Returns whether every part has run and every rank has its reply, but the tick is not
        closed."""
        return not (self.closed or self.undone or self.unreplied)

    def arrive(self, rank: int) -> list[int]:
        """The rows of ``rank`` are here; returns the parts that may run now, in order."""
        assert rank in self._outline.before_reply, f"{self.tick}: rank {rank} was not asked"
        self.arrived.add(rank)
        ready = [i for i in sorted(self._awaiting) if self._outline.needs[i] <= self.arrived]
        self._awaiting.difference_update(ready)
        return ready

    def leave(self, ranks: Set[int]) -> None:
        """The rows of ``ranks`` will not come, and nobody else's reply waits for them."""
        self._left |= ranks
        self.unreplied -= ranks
        lost = {part for part, needed in enumerate(self._outline.needs) if needed & ranks}
        self.undone -= lost
        self._awaiting -= lost

    def part_done(self, part: int) -> list[int]:
        """A part has run; returns the ranks to reply to, in order."""
        self.undone.discard(part)
        if self.closed:
            return []
        return [
            rank
            for rank in sorted(self.unreplied & self.arrived)
            if not self._outline.before_reply[rank] & self.undone
        ]

    def last_replies(self) -> list[int]:
        """Once nothing is left to run, the ranks whose reply waits for nothing but the rows of all:
        those that gave only keys, which nobody read."""
        everybody = self.arrived | self._left == self._outline.before_reply.keys()
        return sorted(self.unreplied) if everybody and not self.undone else []

    def replied(self, rank: int) -> None:
        """``rank`` has its reply."""
        self.unreplied.discard(rank)

    def give_up(self, failure: BaseException) -> list[int]:
        """Ends the tick without results; returns the ranks to inform, in order."""
        self.failure = failure
        return sorted(self.unreplied & self.arrived)

    def close(self) -> None:
        """Ends the tick: every rank has its reply, or knows that it gets none."""
        self.closed = True
