"""Runs of a model for its shapes alone, in which nothing is served: PyTorch's pipelining finds
shapes by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from trainer_client.hooks.checkpointing import CheckpointedCall, Checkpoints, Recomputed

_SHAPES = object()
"""Stands for the lane in checkpoints of such a run."""

_is_dry_run: ContextVar[bool] = ContextVar("distca_dry_run", default=False)


@contextmanager
def for_shapes() -> Iterator[None]:
    """Runs the model in the block for its shapes alone."""
    token = _is_dry_run.set(True)
    try:
        yield
    finally:
        _is_dry_run.reset(token)


def is_shape_inference(recomputed: CheckpointedCall | None) -> bool:
    """Return whether the caller runs for its shapes, or is ``recomputed`` for a run that did."""
    if recomputed:
        return recomputed.caller is _SHAPES
    return _is_dry_run.get()


def of_the_right_shape(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, checkpoints: Checkpoints
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros of the shapes and dtypes of core attention's o and lse, through which q, k and v get
    gradients, zeros as well; again in a checkpoint that is recomputed."""
    if region := checkpoints.recomputed:
        o, lse = Recomputed.apply(q, k, v, *region.take())  # type: ignore[no-untyped-call]
    else:
        o, lse = _Shapes.apply(q, k, v, checkpoints.keep)  # type: ignore[no-untyped-call]
    return o, lse


class _Shapes(torch.autograd.Function):
    """Saves what core attention saves, in the same order, as checkpoints compare that."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keep: Callable[[object, torch.Tensor, torch.Tensor], None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o = v.new_zeros(*q.shape[:-1], v.shape[-1])
        lse = q.new_zeros(q.shape[:-1], dtype=torch.float32)
        keep(_SHAPES, o, lse)
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None
