"""Some rows of core attention again, at home, in float32: what an audit compares a server with.

Written from the definition, not from a kernel. Everything is given by row, so a few rows of a long
task cost a few rows. Besides each value there is its *magnitude*: the sum of the absolute values of
the terms that were summed, which is what rounding errors are relative to.

Below, R is the number of chosen rows, M of keys, N of queries, D of dimensions, all of one query
head or of the kv head that it belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from core_attention.ca_task import MaskKind
from core_attention.score_rule import PLAIN, ScoreRule

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Expected:
    """A result as it should be.

    Attributes:
        value: float32.
        magnitude: of the terms behind each element; same shape.
    """

    value: torch.Tensor
    magnitude: torch.Tensor


def forward_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    rule: ScoreRule = PLAIN,
) -> dict[str, Expected]:
    """o and lse of some queries.

    Args:
        q: ``[R, num_heads, D]`` the chosen queries.
        k, v: ``[M, num_heads_kv, D]`` the document's first M rows.
        positions: ``[R]`` of the chosen queries in the document, all less than M.
        scale: multiplies q.k before softmax.
        rule: mask and softcap.
    """
    o, o_magnitude, lse = [], [], []
    for head, kv_head in _heads(q, k):
        scores, _ = _scores(q[:, head], k[:, kv_head], positions, None, scale, rule)
        weights, values = torch.softmax(scores, -1), v[:, kv_head].float()
        o.append(weights @ values)
        o_magnitude.append(weights @ values.abs())
        lse.append(torch.logsumexp(scores, -1))
    stacked = torch.stack(lse, 1)
    return {
        "o": Expected(torch.stack(o, 1), torch.stack(o_magnitude, 1)),
        "lse": Expected(stacked, stacked.abs().clamp(min=1.0)),
    }


def query_gradient_rows(
    queries: Tensors,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    rule: ScoreRule = PLAIN,
) -> dict[str, Expected]:
    """dq of some queries.

    Args:
        queries: q, do ``[R, num_heads, D]``, lse and delta ``[R, num_heads]`` of them.
        k, v, positions, scale, rule: as for :func:`forward_rows`.
    """
    value, magnitude = [], []
    for head, kv_head in _heads(queries["q"], k):
        key = k[:, kv_head].float()
        _, gradient, size = _score_gradients(
            queries, k, v, positions, None, (head, kv_head), scale, rule
        )
        value.append(scale * (gradient @ key))
        magnitude.append(scale * (size @ key.abs()))
    return {"dq": Expected(torch.stack(value, 1), torch.stack(magnitude, 1))}


def key_gradient_rows(
    queries: Tensors,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    key_positions: torch.Tensor,
    scale: float,
    rule: ScoreRule = PLAIN,
) -> dict[str, Expected]:
    """dk and dv of some keys, summed over given queries.

    Args:
        queries: q, do, lse and delta of N queries.
        k, v: ``[R, num_heads_kv, D]`` the chosen keys.
        positions: ``[N]`` of the queries in the document.
        key_positions: ``[R]`` of the keys.
        scale, rule: as for :func:`forward_rows`.
    """
    n_heads_kv = k.shape[1]
    dk = [[torch.zeros(len(k), k.shape[2]) for _ in range(2)] for _ in range(n_heads_kv)]
    dv = [[torch.zeros(len(v), v.shape[2]) for _ in range(2)] for _ in range(n_heads_kv)]
    for head, kv_head in _heads(queries["q"], k):
        weights, gradient, size = _score_gradients(
            queries, k, v, positions, key_positions, (head, kv_head), scale, rule
        )
        q, do = queries["q"][:, head].float(), queries["do"][:, head].float()
        dk[kv_head][0] += scale * (gradient.T @ q)
        dk[kv_head][1] += scale * (size.T @ q.abs())
        dv[kv_head][0] += weights.T @ do
        dv[kv_head][1] += weights.T @ do.abs()
    return {
        name: Expected(
            torch.stack([value for value, _ in heads], 1),
            torch.stack([magnitude for _, magnitude in heads], 1),
        )
        for name, heads in (("dk", dk), ("dv", dv))
    }


def _heads(q: torch.Tensor, k: torch.Tensor) -> list[tuple[int, int]]:
    """(query head, its kv head) of all query heads."""
    group_size = q.shape[1] // k.shape[1]
    return [(head, head // group_size) for head in range(q.shape[1])]


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    key_positions: torch.Tensor | None,
    scale: float,
    rule: ScoreRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[R, M]`` scaled, capped and masked scores of one head, and their derivative by q.k scaled.

    Args:
        key_positions: None: all of the document's, from its first on.
    """
    scores, slope = scale * (q.float() @ k.float().T), torch.ones(())
    if rule.softcap:
        tanh = torch.tanh(scores / rule.softcap)
        scores, slope = rule.softcap * tanh, 1 - tanh.square()
    if rule.mask is MaskKind.CAUSAL:
        if key_positions is None:
            key_positions = torch.arange(len(k))
        ahead = key_positions[None, :] - positions[:, None]
        hidden = ahead > 0 if rule.window is None else (ahead > 0) | (ahead <= -rule.window)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores, slope


def _score_gradients(
    queries: Tensors,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    key_positions: torch.Tensor | None,
    heads: tuple[int, int],
    scale: float,
    rule: ScoreRule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, gradients of the scaled products and their magnitudes, ``[queries, keys]`` each
    (FlashAttention-2, section 3.1), of ``heads``: a query head and its kv head."""
    head, kv_head = heads
    scores, slope = _scores(
        queries["q"][:, head], k[:, kv_head], positions, key_positions, scale, rule
    )
    weights = torch.exp(scores - queries["lse"][:, head, None].float())
    do, value = queries["do"][:, head].float(), v[:, kv_head].float()
    delta = queries["delta"][:, head, None].float()
    # Without the slope, which is 1 less a number that has been rounded.
    size = weights * (do.abs() @ value.abs().T + delta.abs())
    return weights, weights * slope * (do @ value.T - delta), size
