"""The process's own kernel, for what is computed here instead of by servers."""

from __future__ import annotations

import functools
import threading

import torch

from core_attention.kernels.protocol import Kernel
from core_attention.kernels.select import select_kernel
from core_attention.shape import AttentionShape


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
def own_kernel(device: torch.device) -> tuple[Kernel, threading.Lock]:
    """The process's own kernel on ``device``, and what a thread holds while it calls it."""
    return select_kernel(device), threading.Lock()
