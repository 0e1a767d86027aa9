"""Runs of a model on garbage, in which nothing is served: PyTorch's pipelining finds shapes by
them, and nano-batches without rows have no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from trainer_client.hooks.checkpointing import Checkpoints, Recomputed, Region
from trainer_client.step.lane import current_lane

_SHAPES = object()
"""Stands for the lane where there is none."""

_for_shapes: ContextVar[bool] = ContextVar("distca_for_shapes", default=False)


@contextmanager
def for_shapes() -> Iterator[None]:
    """In the block, a model that runs in no nano-batch runs for its shapes alone."""
    token = _for_shapes.set(True)
    try:
        yield
    finally:
        _for_shapes.reset(token)


def is_shape_inference(recomputed: Region | None) -> bool:
    """Whether the caller runs for its shapes: in no nano-batch or one without rows, nor
    ``recomputed`` for another."""
    if recomputed:
        return recomputed.caller is _SHAPES
    if (lane := current_lane.get()) is not None:
        return lane.without_rows
    return _for_shapes.get()


def of_the_right_shape(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, checkpoints: Checkpoints, *, served: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros of the shapes and dtypes of core attention's o and lse, through which q, k and v get
    gradients, zeros as well; again in a checkpoint that is recomputed. A lane gives way in layers
    that are ``served``, as it does with rows."""
    if region := checkpoints.recomputed:
        o, lse = Recomputed.apply(q, k, v, *region.take())  # type: ignore[no-untyped-call]
    else:
        lane = current_lane.get()
        if served and lane is not None:
            lane.give_way()
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
