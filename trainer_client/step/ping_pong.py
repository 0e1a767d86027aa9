"""Ping-pong: the nano-batches of a step take turns; one computes while the other's data move.

Works without changing a module's code: every nano-batch's forward runs in a greenlet of its own,
and core attention switches to the next one after sending (paper, section 4.1). So one forward pass
is interrupted by another at every layer: what a module leaves on itself for a later part of its own
pass may be the other's by then.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import greenlet

from trainer_client.errors import SessionError
from trainer_client.hooks.checkpointing import end_checkpoints, in_checkpoint
from trainer_client.hooks.lane_random import LaneRandom
from trainer_client.hooks.thread_state import ThreadState
from trainer_client.step.lane import Lane, check_nano_batch, current_lane, require_step
from trainer_client.step.running_step import RunningStep

Call = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Arguments, and those with names."""


def run_in_turns(forward: Callable[..., Any], calls: Sequence[Call], first: int) -> list[Any]:
    """The outputs of ``forward`` for consecutive nano-batches of the running step, interleaved at
    the attention points.

    Args:
        forward: the model, or a part of it.
        calls: its arguments for each nano-batch.
        first: the first one's nano-batch.
    """
    running = require_step()
    check_nano_batch(running, first + len(calls) - 1)
    return TakenTurns(forward, running, calls, first=first).run()


class TakenTurns:
    """One greenlet per nano-batch; this one hands out the turns, round robin. For the arguments see
    :func:`run_in_turns`."""

    def __init__(
        self,
        forward: Callable[..., Any],
        running: RunningStep,
        calls: Sequence[Call],
        *,
        first: int = 0,
    ) -> None:
        if len(calls) > 1 and in_checkpoint():
            raise SessionError(
                "an activation checkpoint is around nano-batches that take turns; checkpoint "
                "layers of the model, not the whole model"
            )
        self._forward = forward
        self._running = running
        self._random = LaneRandom(len(calls))
        self._first = first
        self._outputs: list[Any] = [None] * len(calls)
        self._referee = greenlet.getcurrent()
        self._players = [self._player(index, call) for index, call in enumerate(calls)]

    def run(self) -> list[Any]:
        """The outputs, one for each nano-batch."""
        state = ThreadState()
        try:
            playing = dict(enumerate(self._players))
            while playing:
                for index, player in list(playing.items()):
                    begin = time.perf_counter()
                    player.switch()
                    self._running.record(
                        f"nano-batch {self._first + index}",
                        "turn",
                        begin,
                        time.perf_counter(),
                        "forward",
                    )
                    state.restore()
                    if player.dead:
                        del playing[index]
            # Lanes lead back here, and autograd keeps those until the backward pass.
            outputs, self._outputs = self._outputs, []
            return outputs
        except BaseException as error:
            end_checkpoints(error)
            raise
        finally:
            # After an error in one lane the others must not stay suspended with their tensors.
            for player in self._players:
                if not player.dead:
                    player.throw(greenlet.GreenletExit)
            # Their contexts lead back here: a cycle that would keep the outputs, and all that
            # autograd has saved for them, until garbage is collected.
            self._players.clear()
            state.restore()
            self._random.end()

    def _player(self, index: int, call: Call) -> greenlet.greenlet:
        context, nano_batch = contextvars.copy_context(), self._first + index
        beside = range(self._first, self._first + len(self._outputs))
        lane = Lane.of(self._running, nano_batch, lambda: self._give_way(index), beside)
        context.run(current_lane.set, lane)
        arguments, named = call

        def play() -> None:
            self._random.enter(index)
            try:
                self._outputs[index] = self._forward(*arguments, **named)
            finally:
                self._random.leave(index)

        player = greenlet.greenlet(play)
        player.gr_context = context
        return player

    def _give_way(self, index: int) -> None:
        state = ThreadState()
        self._random.leave(index)
        try:
            self._referee.switch()
        finally:
            # A lane that is ended here, since another has failed, leaves what it is in: activation
            # checkpoints take hooks away that must be there.
            state.restore()
            self._random.enter(index)
