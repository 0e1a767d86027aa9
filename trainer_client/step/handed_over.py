"""Keys that nano-batch 0 hands over to nano-batch 1, layer by layer, and their gradients back.

A document may begin in nano-batch 0 and go on in nano-batch 1, whose queries then need the keys and
values that nano-batch 0 has computed in the same layer. They are sent again, with nano-batch 1's
own. In the backward pass nano-batch 1 comes first in every layer: what it finds for these keys is
added to what nano-batch 0 finds, in float32, and rounded once. Autograd sees to the order by a
*link*, an empty tensor that nano-batch 0's operation gives and nano-batch 1's takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer_client.errors import SessionError
from trainer_client.step.replies import Tensors

_APART = (
    "nano-batch 0 and nano-batch 1 share a document, and the backward pass of nano-batch 0 came to "
    "a layer before that of nano-batch 1: add up the losses of both, and run backward once"
)

_ONCE = (
    "nano-batch 0 and nano-batch 1 share a document, and a backward pass came to a layer twice: "
    "core attention is differentiable once; run backward once, without retain_graph"
)


class HandedOver:
    """The keys of one layer.

    Args:
        k: ``[rows, heads_kv, head_dim]`` of nano-batch 0, by packed row.
        v: ``[rows, heads_kv, head_dim_v]``, likewise.
        runs: (first packed row, rows) of what nano-batch 1 carries over, in its order.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, runs: Sequence[tuple[int, int]]) -> None:
        self._runs = runs
        self._rows: Tensors = {name: _take(rows.detach(), runs) for name, rows in _named(k, v)}
        self._gradients: Tensors = {}
        self._is_answered, self._is_over = True, False

    def take(self, *, answers: bool) -> None:
        """Nano-batch 1 has come to the layer.

        Args:
            answers: and will have gradients for the keys.

        Raises:
            SessionError: nano-batch 0's backward pass has come to it before.
        """
        if self._is_over:
            raise SessionError(_APART)
        self._is_answered = not answers

    @property
    def rows(self) -> Tensors:
        """k and v of the keys that are carried over.

        Raises:
            SessionError: nano-batch 1's backward pass was run before.
        """
        if not self._rows:
            raise SessionError(_ONCE)
        return self._rows

    def answer(self, gradients: Tensors) -> None:
        """Nano-batch 1's float32 dk and dv for these keys, in their order."""
        self._rows, self._gradients, self._is_answered = {}, gradients, True

    def add_to(self, gradients: Tensors) -> None:
        """Adds them to nano-batch 0's float32 dk and dv, by packed row.

        Raises:
            SessionError: nano-batch 1's backward pass has not come to this layer, or this was done
                before.
        """
        if self._is_over:
            raise SessionError(_ONCE)
        if not self._is_answered:
            raise SessionError(_APART)
        at = 0
        for begin, length in self._runs if self._gradients else ():
            for name, rows in gradients.items():
                rows[begin : begin + length] += self._gradients[name][at : at + length]
            at += length
        self._rows, self._gradients, self._is_over = {}, {}, True


def _named(k: torch.Tensor, v: torch.Tensor) -> tuple[tuple[str, torch.Tensor], ...]:
    return ("k", k), ("v", v)


def _take(rows: torch.Tensor, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The rows of ``runs``; ``rows`` itself, and no copy of it, if that is all of them in order."""
    if len(runs) == 1 and runs[0] == (0, len(rows)):
        return rows
    return torch.cat([rows[begin : begin + length] for begin, length in runs])
