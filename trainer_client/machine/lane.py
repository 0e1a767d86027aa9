"""The ticks of one nano-batch of a running step, and for how long their inputs are kept.

A rank that shares a document with this one may have to replay a tick that is complete here; then
this rank sends its part again. How far behind they can be follows from causal attention (see
``docs/fault_tolerance.md``): in the backward pass one call; in the forward pass any number, but
only until the first backward tick is complete here, since that one needs theirs. A rank that shares
no document keeps nothing of complete ticks.

Where something else keeps the ranks together (weights that are gathered layer by layer), fewer
forward ticks need be kept. A recovery that asks for one that is gone ends the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from core_attention.ca_task import Phase
from core_attention.tick import Tick
from trainer_client.machine.instructions import ForgetInputs, ForgetQueries, LetGo
from trainer_client.machine.lane_calls import LaneCalls
from trainer_client.machine.outlines import LaneOutline


@dataclass(eq=False, slots=True)
class BegunTick:
    """A tick that the training loop has begun.

    Attributes:
        tick: which exchange.
        index: its place in its lane.
        is_complete: its replies have been taken in.
        is_kept: its inputs, or at least what others may need of them, are still there.
        sent_in: the epoch in which it was last to be sent; 0 if in none.
        under_way_in: the epoch in whose replies it waits for; None if in none.
        examined_in: the epoch whose replies are being examined; None if there are none.
    """

    tick: Tick
    index: int
    is_complete: bool = False
    is_kept: bool = True
    sent_in: int = 0
    under_way_in: int | None = None
    examined_in: int | None = None

    def leave(self) -> list[LetGo]:
        """Its replies are not wanted any more. Those that are being examined are let go of by the
        one who does."""
        epoch, self.under_way_in = self.under_way_in, None
        return [] if epoch is None or epoch == self.examined_in else [LetGo(self.tick, epoch)]

    def end_examination(self, epoch: int) -> bool:
        """Return whether the replies that were examined still count."""
        counts, self.examined_in = self.under_way_in == epoch, None
        if counts:
            self.under_way_in = None
        return counts


class LaneMachine:
    """One nano-batch of a running step.

    Args:
        outline: whether it has rows, and shares documents.
        calls: its calls of core attention.
        n_ticks: how many ticks a lane of the job has.
        end: the place behind the last tick that servers expect of this one.
        kept_forward_ticks: of how many complete forward calls the inputs are kept, the latest; None
            for all of them.

    Attributes:
        complete_ticks: how many ticks are complete, from the first on; those that the lane does
            not have, before its first layer, count as complete.
        n_ticks: how many ticks a lane of the job has.
    """

    def __init__(
        self,
        outline: LaneOutline,
        calls: LaneCalls,
        *,
        n_ticks: int,
        end: int,
        kept_forward_ticks: int | None = None,
    ) -> None:
        self.outline = outline
        self.calls = calls
        self.complete_ticks = calls.first_layer
        self.n_ticks, self._end = n_ticks, end
        self._kept_forward_ticks = kept_forward_ticks
        self._begun: dict[int, BegunTick] = {}

    def __iter__(self) -> Iterator[BegunTick]:
        """The ticks that have begun, in lane order."""
        return iter([self._begun[index] for index in sorted(self._begun)])

    def __getitem__(self, index: int) -> BegunTick:
        return self._begun[index]

    @property
    def begun_ticks(self) -> int:
        """How many ticks have begun, complete or not; counted as ``complete_ticks``."""
        return self.calls.first_layer + len(self._begun)

    @property
    def is_over(self) -> bool:
        """Return whether every tick that will come is complete."""
        return not self.outline.has_rows or self.complete_ticks == self.calls.end

    @property
    def progress(self) -> int:
        """How many of the ticks that servers count are complete. A lane that is over has none to
        come, although it may be shorter."""
        if self.is_over:
            return self.n_ticks
        return self.complete_ticks if self.complete_ticks > self.calls.first_layer else 0

    @property
    def end(self) -> int | None:
        """The place of the first tick that servers expect and that will not come, because no
        gradients are needed from some layer down; None if there is none or nobody knows yet."""
        end = self.calls.end
        return None if end is None or end >= self._end else end

    def end_under(self, epoch: int) -> int | None:
        """The place behind the last tick that was sent in ``epoch``; None if servers expect none
        from there on."""
        sent = [begun.index + 1 for begun in self if begun.sent_in == epoch]
        end = max(sent, default=self.calls.first_layer)
        return end if end < self._end else None

    @property
    def can_stop(self) -> bool:
        """True if nobody waits for a tick that has begun, nor for one that has not."""
        return not self.outline.is_shared and all(begun.is_complete for begun in self)

    def stop(self) -> None:
        """No tick will come after those that are complete."""
        if not self.is_over:
            self.calls.stop(self.complete_ticks)

    def begin(self, tick: Tick, index: int) -> BegunTick:
        """The training loop has the rows of a tick."""
        begun = self._begun[index] = BegunTick(tick, index)
        return begun

    def unsent(self, epoch: int, first_tick: int) -> list[BegunTick]:
        """The ticks still to be sent in ``epoch``: those that are not complete, and complete ones
        from ``first_tick`` on, that others need rows of."""
        return [
            begun
            for begun in self
            if begun.sent_in != epoch and (not begun.is_complete or begun.index >= first_tick)
        ]

    def complete(self, done: BegunTick) -> Sequence[ForgetInputs | ForgetQueries]:
        """The replies of a tick are taken in; returns which inputs nobody needs now."""
        done.is_complete = True
        while (following := self._begun.get(self.complete_ticks)) and following.is_complete:
            self.complete_ticks += 1
        if not self.outline.is_shared:
            return self._forget([done])
        n_groups = self.calls.head_groups
        if done.tick.phase is Phase.BACKWARD:
            # Others sent it when the call before was complete, though not all of this one.
            return self._forget(self._complete_before(done.index - done.index % n_groups))
        # Its own queries are answered: if others replay it, any will do in their place.
        if self._kept_forward_ticks is None:
            return [ForgetQueries(done.tick)]
        end = done.index - self._kept_forward_ticks * n_groups + 1
        return [ForgetQueries(done.tick), *self._forget(self._complete_before(end))]

    def leave(self) -> list[LetGo]:
        """No tick is under way any more."""
        return [each for begun in self for each in begun.leave()]

    def release(self) -> list[LetGo | ForgetInputs]:
        """Nobody asks for anything again."""
        return [*self.leave(), *self._forget(list(self))]

    def _complete_before(self, end: int) -> list[BegunTick]:
        return [begun for begun in self if begun.is_complete and begun.index < end]

    def _forget(self, ticks: list[BegunTick]) -> list[ForgetInputs]:
        forgotten = [begun for begun in ticks if begun.is_kept]
        for begun in forgotten:
            begun.is_kept = False
        return [ForgetInputs(begun.tick) for begun in forgotten]
