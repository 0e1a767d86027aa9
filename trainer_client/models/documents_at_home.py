"""Core attention of packed documents by PyTorch, one after another, where the model is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Causal attention within each document; no mask of rows times rows is made.

    Args:
        q: ``[..., num_heads, rows, head_dim]``.
        k: ``[..., num_heads_kv, rows, head_dim]``.
        v: ``[..., num_heads_kv, rows, head_dim_v]``.
        lengths: of the documents, in packed order; their sum is the rows.
        scale: multiplies q.k; None is 1 / sqrt(head_dim).
        dropout: of attention weights.

    Returns:
        o ``[..., num_heads, rows, head_dim_v]``.
    """
    parts = (tensor.split(list(lengths), dim=-2) for tensor in (q, k, v))
    outputs = [
        scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, dropout_p=dropout, enable_gqa=True
        )
        for query, key, value in zip(*parts, strict=True)
    ]
    return torch.cat(outputs, dim=-2)
