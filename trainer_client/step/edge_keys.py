"""Edge keys that other ranks have: what one call of a layer at home gives, takes and answers.

Forward, a rank gives the keys and values that queries of other ranks need and takes those that its
own need. Backward, it answers each message of keys with their gradients, in float32, and adds the
answers to its own messages to what it has found for these keys itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from core_attention.ca_task import Phase
from core_attention.message import MessageLayout, edge_layout
from core_attention.shape import AttentionShape
from core_attention.tick import Tick
from trainer_client.errors import SessionError
from trainer_client.step.handed_over import add_rows, rows_of
from trainer_client.step.neighbours import EdgeMessage, Neighbours
from trainer_client.step.replies import Tensors


class GivenKeys(NamedTuple):
    """Keys of this rank that queries of another one need, in layers of one kind.

    Attributes:
        rank: the other one.
        nano_batch: of the queries.
        is_carried: whether the keys are of the nano-batch before that of the queries.
        runs: (first packed row, rows) in the keys' nano-batch.
    """

    rank: int
    nano_batch: int
    is_carried: bool
    runs: tuple[tuple[int, int], ...]

    @property
    def n_rows(self) -> int:
        return sum(length for _, length in self.runs)


class TakenKeys(NamedTuple):
    """Keys of another rank that queries of this one need.

    Attributes:
        rank: the other one.
        nano_batch: of the queries.
        is_carried: as of :class:`GivenKeys`.
        n_rows: how many.
    """

    rank: int
    nano_batch: int
    is_carried: bool
    n_rows: int


@dataclass(eq=False)
class EdgeCall:
    """One call of a nano-batch.

    Attributes:
        exchange: exchanges messages.
        step: of the call.
        call: its number among those at home.
        given, taken: keys that others need, and those of others.
        shape: of the layer.
        waited: called with each message that was waited for, from when to when.
        rows: of each of ``taken``, k and v, once they are here.
    """

    exchange: Neighbours
    step: int
    call: int
    given: Sequence[GivenKeys]
    taken: Sequence[TakenKeys]
    shape: AttentionShape
    waited: Callable[[EdgeMessage, float, float], None]
    rows: Sequence[Tensors] = field(default=())
    _is_over: bool = False

    def give(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Sends what others need; returns at once.

        Args:
            k: ``[rows, num_heads_kv, head_dim]`` of the nano-batch, by packed row.
            v: ``[rows, num_heads_kv, head_dim_v]``, likewise.
        """
        for keys in self.given:
            rows = {"k": rows_of(k, keys.runs), "v": rows_of(v, keys.runs)}
            self._send(keys, Phase.FORWARD, rows)

    def take(self) -> None:
        """Waits for the keys of others. Raises as :meth:`Neighbours.take`."""
        self.rows = [self._take(keys, Phase.FORWARD) for keys in self.taken]

    def answer(self, gradients: Sequence[Tensors]) -> None:
        """Sends the gradients of the keys of others; returns at once.

        Args:
            gradients: of each of ``taken``, float32 dk and dv.
        """
        for keys, found in zip(self.taken, gradients, strict=True):
            self._send(keys, Phase.BACKWARD, found)
        self.rows = ()

    def add_answers(self, gradients: Tensors) -> None:
        """Waits for what others have found for this rank's keys, and adds it to float32 dk and dv,
        by packed row. Raises as :meth:`Neighbours.take`."""
        for keys in self.given:
            found = self._take(keys, Phase.BACKWARD)
            self.exchange.let_go(self._message(keys, Phase.FORWARD))
            add_rows(gradients, found, keys.runs)

    def begin_backward(self) -> None:
        """A backward pass has come to the call."""
        if self._is_over:
            raise SessionError(
                f"step {self.step}: backward came twice to layer {self.call} of those at home; run "
                "backward once, without retain_graph"
            )
        self._is_over = True

    def _send(self, keys: GivenKeys | TakenKeys, phase: Phase, rows: Tensors) -> None:
        self.exchange.send(self._message(keys, phase), self._layout(keys, phase), rows)

    def _take(self, keys: GivenKeys | TakenKeys, phase: Phase) -> Tensors:
        message, begin = self._message(keys, phase), time.perf_counter()
        rows = self.exchange.take(message, self._layout(keys, phase))
        self.waited(message, begin, time.perf_counter())
        return rows

    def _message(self, keys: GivenKeys | TakenKeys, phase: Phase) -> EdgeMessage:
        tick = Tick(self.step, self.call, keys.nano_batch, phase)
        return EdgeMessage(keys.rank, tick, keys.is_carried)

    def _layout(self, keys: GivenKeys | TakenKeys, phase: Phase) -> MessageLayout:
        return edge_layout(keys.n_rows, self.shape, phase)
