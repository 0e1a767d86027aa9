"""Keys that a nano-batch hands over to the next one, layer by layer, and their gradients back.

A document may begin in the first nano-batch of a pair and go on in the second, whose queries then
need the keys and values that the first has computed in the same layer. They are sent again, with
the second's own. In the backward pass the second comes first in every layer: what it finds for
these keys is added to what the first finds, in float32, and rounded once. Autograd sees to the
order by a *link*, an empty tensor that the first one's operation gives and the second's takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer_client.errors import SessionError
from trainer_client.hooks.input_versions import Unwritten
from trainer_client.step.replies import Tensors


class HandedOver:
    """The keys of one layer.

    Args:
        k: ``[rows, heads_kv, head_dim]`` of the first nano-batch, by packed row.
        v: ``[rows, heads_kv, head_dim_v]``, likewise.
        nano_batch: the first nano-batch.
        runs: (first packed row, rows) of what the second carries over, in its order.
        copies: the keys are copied, since nothing else sees to it that nobody writes to them.
    """

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        nano_batch: int,
        runs: Sequence[tuple[int, int]],
        *,
        copies: bool,
    ) -> None:
        self._first, self._second = f"nano-batch {nano_batch}", f"nano-batch {nano_batch + 1}"
        self._runs = runs
        taken = {"k": rows_of(k.detach(), runs), "v": rows_of(v.detach(), runs)}
        self._rows: Unwritten | None = Unwritten(self._first, taken, copy=copies)
        self._gradients: Tensors = {}
        self._is_answered, self._is_over = True, False

    def take(self, *, answers: bool) -> None:
        """The second nano-batch has come to the layer.

        Args:
            answers: and will have gradients for the keys.
        """
        if self._is_over:
            raise self._came_apart()
        self._is_answered = not answers

    @property
    def rows(self) -> Tensors:
        """k and v of the keys that are carried over."""
        if self._rows is None:
            raise self._came_twice()
        return self._rows.get()

    def answer(self, gradients: Tensors) -> None:
        """The second nano-batch's float32 dk and dv for these keys, in their order."""
        self._rows, self._gradients, self._is_answered = None, gradients, True

    def add_to(self, gradients: Tensors) -> None:
        """Adds them to the first nano-batch's float32 dk and dv, by packed row."""
        if self._is_over:
            raise self._came_twice()
        if not self._is_answered:
            raise self._came_apart()
        if self._gradients:
            add_rows(gradients, self._gradients, self._runs)
        self._rows, self._gradients, self._is_over = None, {}, True

    def _came_apart(self) -> SessionError:
        return SessionError(
            f"{self._first} and {self._second} share a document, and backward came to "
            f"{self._first} first; add up the losses of both, and run backward once"
        )

    def _came_twice(self) -> SessionError:
        return SessionError(
            f"{self._first} and {self._second} share a document, and backward came to a layer "
            "twice; run backward once, without retain_graph"
        )


def rows_of(rows: torch.Tensor, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The rows of ``runs``, each (first row, rows); ``rows`` itself, and no copy of it, if that is
    all of them in order."""
    if len(runs) == 1 and runs[0] == (0, len(rows)):
        return rows
    return torch.cat([rows[begin : begin + length] for begin, length in runs])


def add_rows(gradients: Tensors, found: Tensors, runs: Sequence[tuple[int, int]]) -> None:
    """Adds what was ``found`` for the rows of ``runs``, one run after another, to ``gradients``."""
    at = 0
    for begin, length in runs:
        for name, rows in gradients.items():
            rows[begin : begin + length] += found[name][at : at + length]
        at += length
