"""The common parts of the GPU kernels: checks of device and shape, and a batch to warm up with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from core_attention.kernels.protocol import BackwardPart, ForwardPart, TaskBatch
from core_attention.shape import AttentionShape

DTYPES = ("bfloat16", "float16")

WARM_UP_ROWS = 512


def check_device(kernel: str, device: torch.device, majors: Sequence[int]) -> tuple[int, int]:
    """The compute capability of ``device``."""
    if device.type != "cuda":
        raise ValueError(f"device is {str(device)!r}; the {kernel} kernel needs a CUDA device")
    if not torch.cuda.is_available():
        raise ValueError(f"the {kernel} kernel needs a CUDA device, and PyTorch finds none")
    capability = torch.cuda.get_device_capability(device)
    if capability[0] not in majors:
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}."
            f"{capability[1]}; the {kernel} kernel needs {', '.join(f'{m}.x' for m in majors)}"
        )
    return capability


def check_dtype(kernel: str, shape: AttentionShape) -> None:
    """Raises ValueError for a dtype of more than 16 bits."""
    if shape.dtype not in DTYPES:
        raise ValueError(
            f"dtype is {shape.dtype!r}; the {kernel} kernel supports {list(DTYPES)}: convert q, k "
            "and v"
        )


def part_shape(part: ForwardPart | BackwardPart) -> AttentionShape:
    """The attention shape of a part's tensors."""
    return AttentionShape(
        num_heads=part.q.shape[1],
        num_heads_kv=part.k.shape[1],
        head_dim=part.q.shape[2],
        head_dim_v=part.v.shape[2],
        dtype=str(part.q.dtype).removeprefix("torch."),
    )


def warm_up_parts(shape: AttentionShape, device: torch.device) -> tuple[ForwardPart, BackwardPart]:
    """One document of zeros in two tasks, which share its keys."""
    ends = np.array([WARM_UP_ROWS // 2, WARM_UP_ROWS], dtype=np.int64)
    zeros = np.zeros(2, dtype=np.int64)
    tasks = TaskBatch(ends - WARM_UP_ROWS // 2, ends, zeros, ends, zeros)

    def rows(heads: int, dim: int, dtype: str = shape.dtype) -> torch.Tensor:
        return torch.zeros(WARM_UP_ROWS, heads, dim, dtype=getattr(torch, dtype), device=device)

    q, o = rows(shape.num_heads, shape.head_dim), rows(shape.num_heads, shape.head_dim_v)
    k, v = rows(shape.num_heads_kv, shape.head_dim), rows(shape.num_heads_kv, shape.head_dim_v)
    lse = rows(shape.num_heads, 1, "float32")[..., 0]
    dk, dv = k.float(), v.float()
    return ForwardPart(q, k, v, o, lse, tasks), BackwardPart(
        q, k, v, o, lse, lse, torch.empty_like(q), dk, dv, tasks
    )
