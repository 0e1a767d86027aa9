"""The geometry of cuts: which part ``[a, b)`` of a document to export.

A chunk ``[a, b)`` carries ``(b^2 - a^2) / 2`` query-key pairs and moves ``b - a`` rows of Q (and
back) and the K and V rows up to b that the receiver lacks. With w_q bytes a q row and w_kv bytes a
k/v row, for given pairs x the bytes ``w_q (b - a) + w_kv b`` are least at

    a = kappa b,   kappa = w_q / (w_q + w_kv),   b = sqrt(2 x / (1 - kappa^2)),

whatever the document's length: a giant document is exported from its middle. If the part at hand
ends before that b, or begins after that a, the best chunk lies at its end, or its beginning.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from control_plane.planner.compiled import compiled_inner, compiled_leaf
from control_plane.planner.costs import Pace, pace_seconds, pair_seconds_at, place_keys

ALIGNMENT_TOKENS = 128
"""Cuts lie at multiples of it in the document: the q tile of the kernels."""
ALIGNMENT_SHARE = 0.005
"""Share of the target load that the queries between two cuts may take, before alignment gets finer:
of very long documents on many servers, 128 queries are too much work to balance with."""

SHORTEST_TOKENS = 64
"""Chunks are shorter only where splitting finds no other way: their seconds hardly fall any
more."""
MOST_ESTIMATES = 4
"""How often a cut is estimated from the rate of the piece that the last estimate gave."""
NEAR_ENOUGH = 0.25
"""Share of the alignment within which two estimates are the same."""


class CutRules(NamedTuple):
    """The cost of a cut and the shortest pieces, in one phase.

    Attributes:
        phase: ``costs.FORWARD`` or ``costs.BACKWARD``.
        q_bytes, kv_bytes: bytes of a row that travels, both ways together.
        kappa: ``a / b`` of the cheapest chunk.
        peak: most pairs per byte, over all chunks that end at b, divided by b.
        ideal: most pairs per byte, over all chunks of x pairs, divided by sqrt(x).
        min_tokens: shortest chunk, but for whole documents.
        min_rest_tokens: shortest piece that a cut may leave behind; and the shortest chunk where
            there is no other way to keep the cap.
        shortest_tokens: shortest piece, where the cap would otherwise rise by more than
            1%: kernels are slow on it, which its seconds say, but one server above the rest
            holds up all of them.
        alignment: cuts lie at multiples of it.
        finest_alignment: and may come to lie at multiples of this.
    """

    phase: int
    q_bytes: float
    kv_bytes: float
    kappa: float
    peak: float
    ideal: float
    min_tokens: int
    min_rest_tokens: int
    shortest_tokens: int
    alignment: int
    finest_alignment: int


def cut_rules(
    phase: int, q_bytes: int, kv_bytes: int, min_tokens: int, finest_alignment: int
) -> CutRules:
    """The rules of a phase; a rest may be half as short as a chunk."""
    # Pairs per byte (b^2 - a^2) / 2 / (w_q (b - a) + w_kv b) are most where they equal a / w_q.
    ratio = 1.0 + kv_bytes / q_bytes
    kappa = q_bytes / (q_bytes + kv_bytes)
    return CutRules(
        phase=phase,
        q_bytes=float(q_bytes),
        kv_bytes=float(kv_bytes),
        kappa=kappa,
        ideal=math.sqrt((1.0 - kappa * kappa) / 2.0) / (q_bytes * (1.0 - kappa) + kv_bytes),
        peak=(ratio - math.sqrt(ratio * ratio - 1.0)) / q_bytes,
        min_tokens=min_tokens,
        min_rest_tokens=max(min_tokens // 2, 1),
        shortest_tokens=min(max(min_tokens // 2, 1), SHORTEST_TOKENS),
        alignment=ALIGNMENT_TOKENS,
        finest_alignment=finest_alignment,
    )


@compiled_inner
def with_alignment(rules: CutRules, target_load_pairs: float, longest: int) -> CutRules:
    """The rules with cuts as fine as a target load of ``target_load_pairs`` query-key pairs needs,
    where the last queries see ``longest`` keys."""
    alignment = ALIGNMENT_TOKENS
    while alignment > rules.finest_alignment and (
        alignment * longest > ALIGNMENT_SHARE * target_load_pairs
    ):
        alignment //= 2
    return CutRules(
        rules.phase,
        rules.q_bytes,
        rules.kv_bytes,
        rules.kappa,
        rules.peak,
        rules.ideal,
        rules.min_tokens,
        rules.min_rest_tokens,
        rules.shortest_tokens,
        alignment,
        rules.finest_alignment,
    )


@compiled_leaf
def with_shorter_chunks(rules: CutRules) -> CutRules:
    """The rules with chunks as short as rests; or, where they are already, both half as short."""
    chunk, rest = rules.min_rest_tokens, rules.min_rest_tokens
    if rules.min_tokens <= rules.min_rest_tokens:
        chunk = rest = max(rules.min_tokens // 2, rules.shortest_tokens)
    return CutRules(
        rules.phase,
        rules.q_bytes,
        rules.kv_bytes,
        rules.kappa,
        rules.peak,
        rules.ideal,
        chunk,
        rest,
        rules.shortest_tokens,
        rules.alignment,
        rules.finest_alignment,
    )


@compiled_leaf
def with_shortest_chunks(rules: CutRules) -> CutRules:
    """The rules with rests as short as cuts may be close to each other, and chunks of any length:
    those at the end of a document that is no multiple of the alignment may be shorter."""
    rest = min(rules.shortest_tokens, rules.finest_alignment)
    return CutRules(
        rules.phase,
        rules.q_bytes,
        rules.kv_bytes,
        rules.kappa,
        rules.peak,
        rules.ideal,
        1,
        rest,
        1,
        rules.alignment,
        rules.finest_alignment,
    )


@compiled_leaf
def cheapest_end(rules: CutRules, pairs: float) -> float:
    """The end of the cheapest chunk of ``pairs``, in a document that is long enough."""
    return math.sqrt(2.0 * pairs / (1.0 - rules.kappa * rules.kappa))


@compiled_leaf
def best_end(cheapest: float, low: int, high: int, resident: int, pairs: float) -> float:
    """The end of the cheapest chunk of ``pairs`` inside ``[low, high)``.

    Args:
        cheapest: :func:`cheapest_end` of ``pairs``.
        resident: the receiver has the K and V of ``[0, resident)`` anyway.
        pairs: fewer than ``[low, high)`` has.
    """
    if low > 0 or resident > 0:
        earliest = math.sqrt(float(low) * low + 2.0 * pairs)
        if resident > earliest:
            # Up to `resident` K and V are free, so the latest queries, with the most pairs each,
            # win.
            return min(float(high), float(resident))
        cheapest = max(cheapest, earliest)
    return min(cheapest, float(high))


@compiled_leaf
def begin_for_pairs(end: float, pairs: float) -> float:
    """The begin of the chunk of ``pairs`` that ends at ``end``; 0 if there are not as many."""
    return math.sqrt(max(end * end - 2.0 * pairs, 0.0))


@compiled_leaf
def begin_for_seconds(pace: Pace, low: int, end: int, seconds: float, alignment: int) -> int:
    """The first query of the longest chunk ``[begin, end)`` inside ``[low, end)`` that takes at
    most ``seconds``; aligned, or ``low``. ``end`` if none does."""
    if pace_seconds(pace, low, end) <= seconds:
        return low
    keys = place_keys(pace.tables, pace.profile, pace.phase, float(end))
    q = 0.5 * (end - low)
    begin = float(low)
    for _ in range(MOST_ESTIMATES):
        rate = pair_seconds_at(pace.tables, pace.profile, keys, q)
        before = begin
        begin = begin_for_pairs(float(end), seconds * pace.speed / rate)
        begin = max(begin, float(low))
        q = max(end - begin, 1.0)
        if abs(begin - before) < NEAR_ENOUGH * alignment:
            break
    aligned = math.ceil(begin / alignment) * alignment
    while aligned < end and pace_seconds(pace, aligned, end) > seconds:
        aligned += alignment
    return min(aligned, end)
