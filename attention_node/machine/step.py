"""The ticks of one planned step: which are open, which are over, and what is still to come."""

from __future__ import annotations

from typing import Generic

from attention_node.machine.outline import StepOutline, TickOutline, Work
from attention_node.machine.tick import TickMachine
from core_attention.tick import Tick


class ServedTicks(Generic[Work]):
    """Follows the ticks of a step.

    Args:
        step: the step's handle.
        outline: what is to come.

    Attributes:
        open: ticks of which some rows have arrived.
        given_up: why the step was given up; empty if it was not.
    """

    def __init__(self, step: Work, outline: StepOutline) -> None:
        self.step = step
        self.outline = outline
        self.open: dict[Tick, TickMachine] = {}
        self.given_up = ""
        self._over: set[Tick] = set()
        # By rank and nano-batch: the place in the lane from which on the rank sends nothing.
        self._lane_ends: dict[tuple[int, int], int] = {}
        self._n_left = sum(map(len, outline.lanes.values()))

    @property
    def finished(self) -> bool:
        """Returns whether every tick is over."""
        return self._n_left == 0

    def open_tick(self, tick: Tick) -> TickMachine | str:
        """The state of ``tick``, begun if need be; or why there is none."""
        if self.given_up:
            return self.given_up
        if tick in self._over:
            return f"{tick} is over on this server"
        ended = self._ended_ranks(tick)
        if self._outline(tick).is_shared_with(ended):
            return self._without_backward(tick)
        if tick not in self.open:
            self.open[tick] = TickMachine(tick, self._outline(tick))
            self.open[tick].leave(ended)
        return self.open[tick]

    def tick_over(self, tick: Tick) -> None:
        """An open tick is complete or was given up."""
        self.open.pop(tick, None)
        if tick not in self._over:
            self._over.add(tick)
            self._n_left -= 1

    def give_up(self, why: str) -> list[TickMachine]:
        """Opens no more ticks; returns those that are open."""
        self.given_up = self.given_up or why
        return list(self.open.values())

    def end_lane(
        self, rank: int, first: Tick
    ) -> tuple[list[Tick], list[TickMachine], list[tuple[TickMachine, str]]]:
        """``rank`` sends nothing of the lane of ``first`` any more, from ``first`` on: it needs no
        gradients from that layer down, has dropped the step, or computes the rest of it itself.

        Returns:
            The ticks that are over by that, since only such ranks take part in them; the open ticks
            that others take part in, which go on without it; and those of them that cannot be
            completed, since they share documents with it, and why.
        """
        self._lane_ends[rank, first.nano_batch] = first.lane_index(self.outline.n_layers)
        ended = [
            tick
            for tick in self.outline.lanes.get(first.nano_batch, ())
            if tick not in self._over and rank in self._ended_ranks(tick)
        ]
        over = [
            tick
            for tick in ended
            if self._ended_ranks(tick) == self._outline(tick).before_reply.keys()
        ]
        self._over.update(over)
        self._n_left -= len(over)
        stuck = [
            (self.open[tick], self._without_backward(tick))
            for tick in ended
            if tick in self.open and self._outline(tick).is_shared_with(self._ended_ranks(tick))
        ]
        given_up = [machine for machine, _ in stuck]
        left = [self.open[tick] for tick in ended if tick in self.open]
        return over, [machine for machine in left if machine not in given_up], stuck

    def _outline(self, tick: Tick) -> TickOutline:
        return self.outline.lanes[tick.nano_batch][tick]

    def _ended_ranks(self, tick: Tick) -> set[int]:
        """The ranks of ``tick`` whose lane ends before it."""
        if not self._lane_ends:
            return set()
        index = tick.lane_index(self.outline.n_layers)
        return {
            rank
            for rank in self._outline(tick).before_reply
            if self._lane_ends.get((rank, tick.nano_batch), index + 1) <= index
        }

    def _without_backward(self, tick: Tick) -> str:
        ended = self._ended_ranks(tick)
        others = sorted(self._outline(tick).before_reply.keys() - ended)
        return (
            f"{tick}: ranks {sorted(ended)} need no gradients from layer {tick.layer} down, and "
            f"ranks {others} do; ranks that share documents must train the same layers"
        )
