"""Nano-batches without rows, for models that cannot be run on none.

Under data parallelism a rank without rows must still take part in collectives of the model's
weights, forward and backward. Models of transformers cannot be run on empty tensors. So they are
run on a few rows of zeros whose core attention is zeros, and whose outputs are dropped: no gradient
comes of them but zeros. They give way to other nano-batches where rows would, so that collectives
come in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from trainer_client.hooks.pipelining_dry_run import for_shapes
from trainer_client.hooks.tensor_parallel import n_shares
from trainer_client.step.lane import current_lane

_LEAST_ROWS = 2
"""A loss of next tokens needs two to have one label, and no mean over none."""

needs_rows: list[Callable[[nn.Module], bool]] = []
"""Each returns whether a module cannot be run on empty tensors; frameworks add theirs."""


def is_without_rows(module: Any, batch: Mapping[str, Any]) -> bool:
    """Return whether ``batch`` has empty tensors and ``module`` cannot be run on them."""
    return (
        _rows_at(batch) is not None
        and isinstance(module, nn.Module)
        and any(needs(module) for needs in needs_rows)
    )


def run_without_rows(module: Callable[..., Any], batch: Mapping[str, Any]) -> Any:
    """The output of ``module`` for a nano-batch without rows: tensors that have rows have none of
    them, others are zeros; both lead to the weights, which get gradients of zeros.

    Args:
        module: the model, or what calls it.
        batch: its arguments by name; tensors without rows have a dimension of size 0.
    """
    rows_at = _rows_at(batch)
    assert rows_at is not None
    # Sequence parallelism gives all ranks of a group equally many rows.
    shares = n_shares(module) if isinstance(module, nn.Module) else 1
    n_rows = max(_LEAST_ROWS, shares)
    given = {name: _filled(value, n_rows) for name, value in batch.items()}
    lane = current_lane.get()
    assert lane is not None
    with for_shapes(lane.give_way):
        output = module(**given)
    return tree_map(lambda leaf: _emptied(leaf, rows_at, n_rows), output)


def _rows_at(batch: Mapping[str, Any]) -> int | None:
    """The dimension in which tensors have no rows; None if all have some."""
    for value in batch.values():
        if isinstance(value, torch.Tensor) and 0 in value.shape:
            return list(value.shape).index(0)
    return None


def _filled(value: Any, n_rows: int) -> Any:
    if not (isinstance(value, torch.Tensor) and 0 in value.shape):
        return value
    return value.new_zeros([size or n_rows for size in value.shape])


def _emptied(leaf: Any, rows_at: int, n_rows: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.dim() > rows_at and leaf.shape[rows_at] == n_rows:
        return leaf.narrow(rows_at, 0, 0)
    return leaf * 0 if leaf.is_floating_point() else leaf
