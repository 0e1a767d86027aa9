"""Core attention by PyTorch alone: documents one after another, or by their scores."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import dropout as drop_out
from torch.nn.functional import scaled_dot_product_attention

from core_attention.ca_task import MaskKind
from trainer_client.step.home_tasks import FULL, LayerKind
from trainer_client.step.sinks import with_sinks
from trainer_client.turns.branches import Branches, Run

_MOST_SCORES = 1 << 26
"""Scores that exist at a time, without gradients: 256 MiB."""


def attend_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    kind: LayerKind = FULL,
    mask: MaskKind = MaskKind.CAUSAL,
    dropout: float = 0.0,
    branches: Branches | None = None,
) -> torch.Tensor:
    """Attention within each document; no mask of all rows times all rows is made.

    Args:
        q: ``[..., num_heads, rows, head_dim]``.
        k: ``[..., num_heads_kv, rows, head_dim]``.
        v: ``[..., num_heads_kv, rows, head_dim_v]``.
        lengths: of the documents, in packed order; their sum is the rows.
        scale: multiplies q.k; None is 1 / sqrt(head_dim).
        softcap: of the scores; 0 is none.
        sinks: ``[num_heads]``, or None.
        kind: which keys a query sees.
        mask: whether later ones among them.
        dropout: of attention weights.
        branches: where documents branch off others, under the causal mask.

    Returns:
        o ``[..., num_heads, rows, head_dim_v]``.
    """
    is_causal = mask is MaskKind.CAUSAL
    by_scores = functools.partial(
        attend_by_scores,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
        sinks=sinks,
        dropout=dropout,
    )
    parts = (tensor.split(list(lengths), dim=-2) for tensor in (q, k, v))
    prefixes = [[]] * len(lengths) if branches is None else branches.prefixes(lengths)
    outputs = []
    for query, own_key, own_value, prefix in zip(*parts, prefixes, strict=True):
        key, value = _path(k, prefix, own_key), _path(v, prefix, own_value)
        n_rows = key.shape[-2]
        if sinks is None and not softcap and (kind.reach is None or kind.reach >= n_rows):
            bias = causal_lower_right(query.shape[-2], n_rows) if prefix else None
            o = scaled_dot_product_attention(
                query, key, value, bias, is_causal=is_causal and not prefix, scale=scale,
                dropout_p=dropout, enable_gqa=True,
            )  # fmt: skip
        elif is_causal:
            first = n_rows - query.shape[-2]
            o = by_scores(query, key, value, seen_rows(q.device, n_rows, kind, first))
        else:
            o = by_scores(query, key, value, lambda begin, end: q.new_ones(1, dtype=torch.bool))
        outputs.append(o)
    return torch.cat(outputs, dim=-2)


def _path(rows: torch.Tensor, prefix: Sequence[Run], own: torch.Tensor) -> torch.Tensor:
    """Rows of a document's path: those of ``prefix``, then its own."""
    if not prefix:
        return own
    return torch.cat([*(rows.narrow(-2, begin, length) for begin, length in prefix), own], dim=-2)


def attend_by_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shown: Callable[[int, int], torch.Tensor],
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention with softcaps and sinks, which PyTorch's own has not, in float32 (float64 stays).

    Without gradients the scores of a few queries exist at a time.

    Args:
        query: ``[batch, num_heads, queries, head_dim]``.
        key: ``[batch, num_heads_kv, keys, head_dim]``.
        value: ``[batch, num_heads_kv, keys, head_dim_v]``.
        shown: of queries ``[begin, end)``: bool, true where a key is seen, or floats that are added
            to the scores; broadcast to ``[batch, num_heads, end - begin, keys]``.
        scale: multiplies q.k.
        softcap: of the scores; 0 is none.
        sinks: ``[num_heads]``, or None.
        dropout: of attention weights.

    Returns:
        o ``[batch, num_heads, queries, head_dim_v]``; of a query that sees no key, any finite
        numbers.
    """
    wide = query.dtype if query.dtype is torch.float64 else torch.float32
    group_size, (batch, heads, rows, _) = query.shape[1] // key.shape[1], query.shape
    keys, values = (tensor.to(wide).repeat_interleave(group_size, dim=1) for tensor in (key, value))
    step = max(1, _MOST_SCORES // (batch * heads * key.shape[2]))
    outputs = []
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        scores = scale * (query[:, :, begin:end].to(wide) @ keys.transpose(-1, -2))
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        mask = shown(begin, end)
        if mask.dtype is torch.bool:
            scores = scores.masked_fill(~mask, torch.finfo(wide).min)
        else:
            scores = scores + mask
        o = drop_out(torch.softmax(scores, -1), dropout) @ values
        if sinks is not None:
            lse = torch.logsumexp(scores, -1).transpose(1, 2)
            o = with_sinks(o.transpose(1, 2), lse, sinks).transpose(1, 2)
        outputs.append(o)
    return torch.cat(outputs, dim=2).to(query.dtype)


def seen_rows(
    device: torch.device, n_keys: int, kind: LayerKind = FULL, first: int = 0
) -> Callable[[int, int], torch.Tensor]:
    """The keys that queries of one causal document see, for :func:`attend_by_scores`; ``first``:
    the position of the first query."""

    def shown(begin: int, end: int) -> torch.Tensor:
        row = torch.arange(first + begin, first + end, device=device)[:, None]
        key = torch.arange(n_keys, device=device)[None, :]
        seen = key <= row
        if kind.window is not None:
            seen &= key > row - kind.window
        if kind.chunk is not None:
            seen &= key // kind.chunk == row // kind.chunk
        return seen

    return shown
