"""What served core attention is compared with at a framework's own hook."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    scale: float | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within documents, in float64, with gradients by autograd.

    Args:
        q: ``[rows, num_heads, head_dim]``.
        k: ``[rows, num_heads_kv, head_dim]``.
        v: ``[rows, num_heads_kv, head_dim_v]``.
        lengths: of the documents, in packed order.
        scale: multiplies q.k; None is 1 / sqrt(head_dim).
        window: tokens that a query sees at most, its own among them; None is all.

    Returns:
        o ``[rows, num_heads, head_dim_v]`` and lse ``[rows, num_heads]``, float64.
    """
    group = q.shape[1] // k.shape[1]
    outputs, sums = [], []
    for one in zip(*(tensor.double().split(list(lengths)) for tensor in (q, k, v)), strict=True):
        query, key, value = one[0], *(each.repeat_interleave(group, dim=1) for each in one[1:])
        scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or q.shape[-1] ** -0.5)
        hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        if window is not None:
            hidden |= torch.ones_like(hidden).tril(-window)
        scores = scores.masked_fill(hidden, -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), value))
        sums.append(scores.logsumexp(dim=-1).T)
    return torch.cat(outputs), torch.cat(sums)
