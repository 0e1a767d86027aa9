"""Row sums of a product, in float32, without tensors in between."""

from __future__ import annotations

import torch


def row_dots(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``(a * b).sum(-1)``, computed in float32.

    Args:
        a, b: ``[rows, heads, dim]``, same shape and dtype, contiguous.

    Returns:
        ``[rows, heads]`` float32.
    """
    if a.device.type == "cuda":
        from core_attention.kernels.gpu_row_dots import launch_row_dots

        return launch_row_dots(a, b)
    return (a.float() * b.float()).sum(-1)
