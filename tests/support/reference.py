"""Plain core attention in float64, document by document: what every kernel is tested against.

Written to be obviously right, not fast: the explicit softmax of the definition, key and value heads
repeated for their group, gradients by autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core_attention.ca_task import MaskKind
from core_attention.score_rule import PLAIN, ScoreRule


@dataclass(frozen=True, eq=False)
class ReferenceResult:
    """Outputs, and gradients where a gradient of o was given; all float64.

    Attributes:
        o: ``[rows, num_heads, head_dim_v]``.
        lse: ``[rows, num_heads]`` natural log of the sum over keys of exp(score).
        dq, dk, dv: gradients, shaped as q, k and v; None if no ``do`` was given.
        dsinks: ``[num_heads]``; None without sinks.
    """

    o: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    do: torch.Tensor | None = None,
    rule: ScoreRule = PLAIN,
    sinks: torch.Tensor | None = None,
) -> ReferenceResult:
    """Core attention of packed documents.

    Args:
        q, k, v, lengths, scale, rule, sinks: as of :func:`packed_attention`.
        do: ``[rows, num_heads, head_dim_v]`` gradient of o, for the gradients of q, k and v.
    """
    q, k, v = (tensor.detach().double().requires_grad_(do is not None) for tensor in (q, k, v))
    if sinks is not None:
        sinks = sinks.detach().double().requires_grad_(do is not None)
    o, lse = packed_attention(q, k, v, lengths, scale, rule, sinks)
    if do is None:
        return ReferenceResult(o, lse)
    wanted = (q, k, v) if sinks is None else (q, k, v, sinks)
    return ReferenceResult(o.detach(), lse.detach(), *torch.autograd.grad(o, wanted, do.double()))


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    scale: float | None = None,
    rule: ScoreRule = PLAIN,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o ``[rows, num_heads, head_dim_v]`` and lse ``[rows, num_heads]`` of packed documents in
    float64, with gradients by autograd.

    Args:
        q: ``[rows, num_heads, head_dim]``, any floating dtype.
        k: ``[rows, num_heads_kv, head_dim]``.
        v: ``[rows, num_heads_kv, head_dim_v]``.
        lengths: tokens of each document, in packed order; they sum to ``rows``.
        scale: multiplies q.k before softmax; None is 1 / sqrt(head_dim).
        rule: mask, window and softcap.
        sinks: ``[num_heads]`` of a further key for each head, which has no value. lse is without.

    Raises:
        ValueError: the lengths do not sum to the rows.
    """
    if sum(lengths) != len(q):
        raise ValueError(f"lengths sum to {sum(lengths)}; q has {len(q)} rows")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    parts = zip(*(tensor.double().split(list(lengths)) for tensor in (q, k, v)), strict=True)
    found = [_document_attention(q, k, v, scale, rule, sinks) for q, k, v in parts]
    o, lse = (torch.cat(each) for each in zip(*found, strict=True))
    return o, lse


def _document_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    rule: ScoreRule,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of one document's rows."""
    n_rows, num_heads, _ = q.shape
    group_size = num_heads // k.shape[1]
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)
    scores = scale * torch.einsum("ihd,jhd->hij", q, k)
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    row = torch.arange(n_rows, device=q.device)
    behind = row[:, None] - row[None, :]
    if rule.mask is MaskKind.CAUSAL:
        scores = scores.masked_fill(behind < 0, float("-inf"))
    if rule.window is not None:
        scores = scores.masked_fill(behind >= rule.window, float("-inf"))
    with_sink = scores
    if sinks is not None:
        column = sinks[:, None, None].expand(num_heads, n_rows, 1)
        with_sink = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(with_sink, dim=-1)[..., :n_rows]
    o = torch.einsum("hij,jhd->ihd", weights, v)
    return o, torch.logsumexp(scores, dim=-1).T
