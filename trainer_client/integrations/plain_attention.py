"""Core attention of one document by PyTorch alone, where nothing is served: in checks of models."""

from __future__ import annotations

import torch
from torch import nn

from core_attention.ca_task import MaskKind
from trainer_client.step.home_tasks import LayerKind
from trainer_client.step.sinks import with_sinks


def attend_plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    kind: LayerKind,
    mask: MaskKind = MaskKind.CAUSAL,
) -> torch.Tensor:
    """Attention within one document, from its first token on.

    Args:
        query: ``[1, num_heads, rows, head_dim]``.
        key: ``[1, num_heads_kv, rows, head_dim]``.
        value: ``[1, num_heads_kv, rows, head_dim_v]``.
        scale: multiplies q.k.
        softcap: of the scores; 0 is none.
        sinks: ``[num_heads]``, or None.
        kind: which keys a query sees.
        mask: whether later ones among them.

    Returns:
        o ``[1, num_heads, rows, head_dim_v]``.
    """
    n_rows = query.shape[2]
    if sinks is None and not softcap and (kind.reach is None or kind.reach >= n_rows):
        return nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=mask is MaskKind.CAUSAL,
            scale=scale,
            enable_gqa=True,
        )
    wide = query.dtype if query.dtype is torch.float64 else torch.float32
    hidden = _hidden(n_rows, kind, query.device)
    if mask is MaskKind.FULL:
        hidden = torch.zeros_like(hidden)
    group_size = query.shape[1] // key.shape[1]
    outputs, sums = [], []
    # Head by head of the keys, so that the scores of a long document fit into memory.
    for head, queries in enumerate(query[0].to(wide).split(group_size)):
        scores = scale * (queries @ key[0, head].to(wide).T)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(hidden, float("-inf"))
        outputs.append(torch.softmax(scores, -1) @ value[0, head].to(wide))
        sums.append(torch.logsumexp(scores, -1))
    o = torch.cat(outputs)
    if sinks is not None:
        o = with_sinks(o.transpose(0, 1), torch.cat(sums).T, sinks).transpose(0, 1)
    return o[None].to(query.dtype)


def _hidden(n_rows: int, kind: LayerKind, device: torch.device) -> torch.Tensor:
    """bool ``[rows, rows]``, true where a query does not see a key."""
    row = torch.arange(n_rows, device=device)
    hidden = row[None, :] > row[:, None]
    if kind.window is not None:
        hidden |= row[None, :] <= row[:, None] - kind.window
    if kind.chunk is not None:
        hidden |= row[None, :] // kind.chunk != row[:, None] // kind.chunk
    return hidden
