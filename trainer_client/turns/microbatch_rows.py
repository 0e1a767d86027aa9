"""Nano-batches in the tensors of a microbatch: each in its row, or all in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from trainer_client.errors import SessionError
from trainer_client.step.lane import require_step
from trainer_client.step.ping_pong import Call
from trainer_client.turns.parts import RowPart, joined, neighbours, rows_joined


@dataclass(frozen=True)
class Cut:
    """The cut of the tensors of a microbatch into nano-batches.

    Attributes:
        dimension: 0 where each nano-batch is a row, 1 where all are parts of the only row.
        size: of each tensor in it.
        parts: one for each nano-batch that has rows.
        first: how many nano-batches without rows come before them.
    """

    dimension: int
    size: int
    parts: Sequence[RowPart]
    first: int

    def calls(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Call]:
        """The arguments of each nano-batch; a number is the same in all."""

        given = tuple(args), dict(kwargs)
        calls: list[Call] = [
            tree_map(lambda value, part=part: self._part(value, part), given) for part in self.parts
        ]
        return calls

    def joined(self, outputs: list[Any]) -> Any:
        """The outputs of all nano-batches as one."""

        return joined(outputs, self._join)

    def _join(self, outputs: Sequence[Any]) -> torch.Tensor:
        output = outputs[0]
        if not isinstance(output, torch.Tensor) or output.ndim <= self.dimension:
            shown = getattr(output, "shape", type(output).__name__)
            raise SessionError(
                f"a stage gave {shown}; stages give tensors of shape [rows, ...], for parts of a "
                "packed row [1, tokens, ...], or tuples of them"
            )
        if self.dimension == 0:
            return torch.cat(list(outputs))
        return rows_joined(outputs, self.parts, 1)

    def _part(self, value: Any, part: RowPart) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            return value
        expected = (self.size,) if self.dimension == 0 else (1, self.size)
        if tuple(value.shape[: self.dimension + 1]) != expected:
            shown = ", ".join(map(str, expected))
            raise SessionError(
                f"a tensor of a microbatch has shape {list(value.shape)}; give [{shown}, ...], as "
                "its nano-batches were submitted, and equally many rows in every step"
            )
        return part.of(value, self.dimension)


def cut_of(
    args: Sequence[Any], kwargs: Mapping[str, Any], microbatch: int, n_nano_batches: int
) -> Cut:
    """The cut of the arguments of a microbatch of the running step.

    Args:
        args, kwargs: of its stage; the first tensor that is no number shows their kind.
        microbatch: its number.
        n_nano_batches: of each microbatch.
    """
    leaves = tree_leaves((tuple(args), dict(kwargs)))
    tensor = next((each for each in leaves if isinstance(each, torch.Tensor) and each.ndim), None)
    if n_nano_batches == 1 or tensor is None or tensor.ndim < 2 or len(tensor) != 1:
        return Cut(0, n_nano_batches, neighbours([1] * n_nano_batches), 0)
    running, begin = require_step(), microbatch * n_nano_batches
    n_rows = [running.n_rows(begin + i) for i in range(n_nano_batches)]
    held = [i for i, rows in enumerate(n_rows) if rows] or [0]
    # Those without rows run nothing, but for one between two others.
    return Cut(1, sum(n_rows), neighbours(n_rows)[held[0] : held[-1] + 1], held[0])
