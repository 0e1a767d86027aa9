"""The ticks that one rank is still to send for one nano-batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic

from attention_node.machine.outline import Work
from attention_node.machine.step import ServedTicks
from attention_node.machine.turns import Place
from core_attention.ca_task import Phase
from core_attention.tick import Tick


@dataclass(frozen=True, eq=False)
class ExpectedTick(Generic[Work]):
    """A tick that a rank is to send.

    Attributes:
        ticks: those of its step.
        tick: which exchange.
        owes_reply: whether the rank waits for rows before it goes on.
        earliest: from which action on it may come; None in a job without pipelines.
        latest: in which action it has come at the latest.
    """

    ticks: ServedTicks[Work]
    tick: Tick
    owes_reply: bool
    earliest: Place | None = None
    latest: Place | None = None


@dataclass(eq=False)
class RankLane(Generic[Work]):
    """The ticks that one rank is still to send for one nano-batch, in order.

    A rank sends the ticks of a call together, when it has got the rows of the call before. So
    receives are posted when the replies before have left, and no memory is held for a message that
    cannot come yet. Only a rank that is owed nothing may be a call ahead.

    Attributes:
        head_groups: ticks of a call.
        expected: ticks for which no receive is posted yet, by step.
        under_way: ticks whose receives are posted, or that are being served.
    """

    head_groups: int = 1
    expected: deque[ExpectedTick[Work]] = field(default_factory=deque)
    under_way: dict[Tick, ExpectedTick[Work]] = field(default_factory=dict)

    def extend(self, step: int, entries: Iterable[ExpectedTick[Work]]) -> None:
        """Adds the ticks of ``step``, before those of later steps: a step whose planning failed
        at first is planned after them."""
        later = [entry for entry in self.expected if entry.tick.step > step]
        for _ in later:
            self.expected.pop()
        self.expected.extend(entries)
        self.expected.extend(later)

    def next_to_post(self, last: Place | None = None) -> ExpectedTick[Work] | None:
        """Takes the tick to post a receive for; None if it cannot come yet. Those of later steps
        do not hold it up: their messages come after the tick's.

        Args:
            last: nothing is posted for later actions than this one; None for no such limit.
        """
        if not self.expected:
            return None
        entry = self.expected[0]
        if last is not None and entry.earliest is not None and entry.earliest > last:
            return None
        call = self._call(entry.tick)
        before = [
            other
            for tick, other in self.under_way.items()
            if tick.step <= entry.tick.step and self._call(tick) != call
        ]
        calls = {self._call(other.tick) for other in before}
        if len(calls) > 1 or any(other.owes_reply for other in before):
            return None
        self.under_way[entry.tick] = self.expected.popleft()
        return entry

    def _call(self, tick: Tick) -> tuple[int, int, Phase]:
        return tick.step, tick.layer // self.head_groups, tick.phase

    def end(self, step: Work) -> list[ExpectedTick[Work]]:
        """The rank sends nothing of ``step`` any more; returns what it was still to send."""
        every = [*self.under_way.values(), *self.expected]
        self.expected = deque(entry for entry in self.expected if entry.ticks.step != step)
        self.under_way = {
            tick: entry for tick, entry in self.under_way.items() if entry.ticks.step != step
        }
        return [entry for entry in every if entry.ticks.step == step]

    def put_back(self, tick: Tick) -> None:
        """Undoes :meth:`next_to_post`: no receive is posted after all. Does nothing if the lane has
        ended since."""
        entry = self.under_way.pop(tick, None)
        if entry is not None:
            self.expected.appendleft(entry)
