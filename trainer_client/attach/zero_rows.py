"""Forwards without a row, for models that cannot be run on none.

A rank without rows must still take part in collectives of the model's weights, forward and
backward, and models of transformers cannot be run on empty tensors. So they are run on a few rows
of zeros whose core attention is zeros, and whose outputs are dropped: no gradient comes of them but
zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from trainer_client.hooks.tensor_parallel import n_shares

_LEAST_ROWS = 2
"""A loss of next tokens needs two to have one label, and no mean over none."""


@dataclass(frozen=True)
class ZeroRows:
    """A few rows of zeros in place of none.

    Attributes:
        rows_at: the dimension in which tensors have no rows.
        n_rows: that they get.
    """

    rows_at: int
    n_rows: int

    @classmethod
    def of(cls, module: nn.Module, named: Mapping[str, Any]) -> ZeroRows | None:
        """Return those for a call of ``module``; None if its arguments have rows."""
        for name in ("input_ids", "inputs_embeds"):
            value = named.get(name)
            if isinstance(value, torch.Tensor) and 0 in value.shape[:2]:
                # Sequence parallelism gives all ranks of a group equally many rows.
                return cls(value.shape.index(0), max(_LEAST_ROWS, n_shares(module)))
        return None

    def filled(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with these rows."""
        return {name: self._fill(value) for name, value in named.items()}

    def emptied(self, output: Any) -> Any:
        """``output`` without them; it leads to the weights, which get gradients of zeros."""
        return tree_map(self._empty, output)

    def _fill(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and 0 in value.shape):
            return value
        return value.new_zeros([size or self.n_rows for size in value.shape])

    def _empty(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.dim() > self.rows_at and leaf.shape[self.rows_at] == self.n_rows:
            return leaf.narrow(self.rows_at, 0, 0)
        return leaf * 0 if leaf.is_floating_point() else leaf
