"""Core attention that is computed here: layers with a window or with chunks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from core_attention.kernels.protocol import BackwardPart, ForwardPart, Kernel, TaskBatch
from core_attention.kernels.row_dots import row_dots
from core_attention.kernels.select import select_kernel
from core_attention.score_rule import ScoreRule
from core_attention.shape import AttentionShape
from core_attention.tensor_checks import check_qkv
from trainer_client.integrations.graphs import outside_graphs

Keep = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes o and lse for the recomputation of a checkpoint."""


@dataclass(frozen=True, eq=False)
class HomeCall:
    """What is computed, apart from the rows.

    Attributes:
        tasks: ranges of rows; together they cover all.
        rule: window and softcap.
        scale: multiplies q.k before the softmax.
    """

    tasks: TaskBatch
    rule: ScoreRule
    scale: float


def attend_at_home(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n_rows: int, call: HomeCall, keep: Keep
) -> tuple[torch.Tensor, torch.Tensor]:
    """o ``[rows, num_heads, head_dim_v]`` and lse ``[rows, num_heads]`` float32; both are
    differentiable once.

    Args:
        q: ``[n_rows, num_heads, head_dim]``, contiguous.
        k, v: ``[n_rows, num_heads_kv, head_dim]`` and ``head_dim_v``, likewise.
        n_rows: of the nano-batch, as the manifest says.
        call: what is computed.
        keep: see :data:`Keep`.

    Raises:
        TensorError: a shape, dtype, device or stride is wrong.
        ValueError: no kernel runs this here; says why.
    """
    shape = shape_of(q, k, v)
    check_qkv(q, k, v, shape, n_rows)
    kernel, _ = home_kernel(q.device)
    kernel.check(shape, call.rule)
    o, lse = _AtHome.apply(q, k, v, call, keep)  # type: ignore[no-untyped-call]
    return o, lse


def shape_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionShape:
    """The shape of rows ``[rows, heads, head_dim]``."""
    return AttentionShape(
        num_heads=q.shape[1],
        num_heads_kv=k.shape[1],
        head_dim=q.shape[2],
        head_dim_v=v.shape[2],
        dtype=str(q.dtype).removeprefix("torch."),
    )


@functools.cache
def home_kernel(device: torch.device) -> tuple[Kernel, threading.Lock]:
    """The process's own kernel on ``device``, and what a thread holds while it calls it."""
    return select_kernel(device), threading.Lock()


class _AtHome(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: HomeCall,
        keep: Keep,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o = v.new_empty((len(q), q.shape[1], v.shape[2]))
        lse = q.new_empty((len(q), q.shape[1]), dtype=torch.float32)
        if len(call.tasks):
            kernel, lock = home_kernel(q.device)
            with lock:
                kernel.forward([ForwardPart(q, k, v, o, lse, call.tasks)], call.scale, call.rule)
        keep(o, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    @outside_graphs
    @once_differentiable
    def backward(
        ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        call: HomeCall = ctx.call
        do, delta = output_gradients(o, do, dlse)
        dq, dk, dv = (
            torch.empty_like(q),
            *(torch.zeros_like(t, dtype=torch.float32) for t in (k, v)),
        )
        if len(call.tasks):
            part = BackwardPart(q, k, v, do, lse, delta, dq, dk, dv, call.tasks)
            kernel, lock = home_kernel(q.device)
            with lock:
                kernel.backward([part], call.scale, call.rule)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def output_gradients(
    o: torch.Tensor, do: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the backward pass of core attention takes of o and lse: the gradient of o, contiguous,
    and delta ``[rows, heads]`` float32, which is rowsum(do * o) - dlse.

    Args:
        o: ``[rows, heads, head_dim_v]``.
        do: its gradient; None is zeros.
        dlse: ``[rows, heads]`` gradient of lse; None is zeros.
    """
    do = torch.zeros_like(o) if do is None else do.contiguous()
    delta = row_dots(do, o)
    return do, delta if dlse is None else delta - dlse
