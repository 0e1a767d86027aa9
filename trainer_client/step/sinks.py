"""Attention sinks: a learned score a head that takes weight and gives no value.

With a sink s, the softmax of a row has exp(s) in its sum besides the keys', so the output is
o * sigmoid(lse - s). That follows from what core attention gives, so kernels and servers know
nothing of it; their lse has a gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from core_attention.errors import TensorError
from trainer_client.hooks.differentiable_once import differentiable_once


def with_sinks(o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The output of attention with a sink for each head.

    Args:
        o: ``[..., num_heads, head_dim_v]`` output without sinks.
        lse: ``[..., num_heads]`` float32 log-sum-exp of the scores without sinks.
        sinks: ``[num_heads]`` any floating dtype.

    Returns:
        As o; computed in float32. Differentiable once in o, lse and sinks.
    """
    if sinks.shape != o.shape[-2:-1] or not sinks.is_floating_point() or sinks.device != o.device:
        raise TensorError(
            f"sinks have shape {tuple(sinks.shape)}, {sinks.dtype} on {sinks.device}; they must be "
            f"one floating-point number for each of the {o.shape[-2]} query heads, on {o.device}"
        )
    result: torch.Tensor = _Sinks.apply(o, lse, sinks)  # type: ignore[no-untyped-call]
    return result


class _Sinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(o, lse, sinks)
        return (o.float() * _gate(lse, sinks)[..., None]).to(o.dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_result: torch.Tensor) -> tuple[torch.Tensor, ...]:
        o, lse, sinks = ctx.saved_tensors
        gate = _gate(lse, sinks)
        d_result = d_result.float()
        do = (d_result * gate[..., None]).to(o.dtype)
        dlse = (d_result * o.float()).sum(-1) * gate * (1 - gate)
        return do, dlse, -dlse.flatten(0, -2).sum(0).to(sinks.dtype)


def _gate(lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """``[..., num_heads]`` share of a row's weight that its keys keep."""
    return torch.sigmoid(lse - sinks.float())
