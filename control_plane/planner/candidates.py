"""The search for the chunk with the most useful work per byte that one receiver can take."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from control_plane.planner.board import (
    BEGIN,
    DOCUMENT,
    END,
    KEYS_END,
    NEXT,
    NEXT_HELD,
    SEGMENT,
    Board,
    Segments,
)
from control_plane.planner.chunk import CutRules, begin_for_pairs, best_end, cheapest_end
from control_plane.planner.compiled import BoolArray, compiled_inner, compiled_leaf
from control_plane.planner.fleet import Fleet
from control_plane.planner.links import Links
from control_plane.planner.senders import N_SENDERS, N_VISITS, Senders, no_senders
from control_plane.planner.target_load import Work
from core_attention.arrays import Float64Array, Int64Array

AS_GOOD = 1.0 - 1e-9
"""A chunk whose value is this close to the most that any could have ends the search."""


class Variant(NamedTuple):
    """A way to break near-ties, so that several plans can be made and the best kept.

    Attributes:
        seed: of the pseudo-random factors.
        spread: the factors lie within ``1 - spread`` to ``1 + spread``; 0 for the plain plan.
        n_shifts: cuts to try on either side of each that the geometry proposes; they matter where
            documents are few steps of the grid of cuts long.
        urgency: how much more a chunk of the sender with the most to give counts than one of a
            sender with next to nothing, if it needs many receivers.
    """

    seed: int
    spread: float
    n_shifts: int
    urgency: float


@compiled_leaf
def factor(variant: Variant, i: int, j: int) -> float:
    """A factor near 1 that depends on the variant and two indices only."""
    if variant.spread == 0.0:
        return 1.0
    x = (variant.seed * 2654435761 + i * 40503 + j * 2246822519 + 374761393) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 2246822519) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 3266489917) & 0xFFFFFFFF
    x ^= x >> 16
    return 1.0 + variant.spread * (2.0 * x / 4294967295.0 - 1.0)


class Candidate(NamedTuple):
    """A chunk to be cut: its sender, the free part it lies in (-1: none), about where it ends, and
    its useful query-key pairs per byte, weighted by link."""

    sender: int
    part: int
    at_end: float
    value: float


ATTEMPTS = 6
"""Parts that a receiver tries: the estimate that ranks them does not see every rule of cuts."""


class Ideal(NamedTuple):
    """The chunk that a sender with long documents can give to one receiver, and what it bounds.

    Attributes:
        pairs: query-key pairs that the receiver has room for and the sender wants to be rid of.
        bound: most pairs per byte of any chunk with at most as many.
        end: where the cheapest chunk of ``pairs`` ends.
        fits_from: parts that begin their document and are this long have that chunk; infinite
            where it has too few queries.
        useful: query-key pairs of it that the sender wants to be rid of.
        value: the same per byte, for a receiver that has none of the keys.
    """

    pairs: float
    bound: float
    end: float
    fits_from: float
    useful: float
    value: float


@compiled_leaf
def _ideal(rules: CutRules, room_pairs: float, need: float) -> Ideal:
    pairs = min(room_pairs, max(need, 1.0))
    end = cheapest_end(rules, pairs)
    begin = begin_for_pairs(end, pairs)
    fits_from = math.inf
    if end - begin >= rules.min_tokens and pairs < 0.5 * end * end:
        fits_from = max(end, float(rules.min_tokens + rules.min_rest_tokens))
    useful = min(0.5 * (end * end - begin * begin), need)
    moved = rules.q_bytes * (end - begin) + rules.kv_bytes * end
    bound = math.sqrt(min(room_pairs, need)) * rules.ideal
    return Ideal(pairs, bound, end, fits_from, useful, useful / moved)


class Market(NamedTuple):
    """The offers of senders to receivers.

    Attributes:
        board, segments, fleet, links: what there is, and where.
        senders: who gives.
        cap: ``[n_servers]`` seconds of attention that each server may reach: what its base load
            leaves.
        receives, pair_rate: ``[n_servers]`` of ``target_load.Work``.
        variant: how near-ties are broken.
        failed: ``[ATTEMPTS]`` free parts that one receiver tried in vain.
        held: ``[room, 2]`` of one receiver: the documents whose keys it has beyond those whole on
            its rank, and up to where.
    """

    board: Board
    segments: Segments
    fleet: Fleet
    links: Links
    senders: Senders
    cap: Float64Array
    receives: BoolArray
    pair_rate: Float64Array
    variant: Variant
    failed: Int64Array
    held: Int64Array


@compiled_inner
def open_market(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    links: Links,
    cap: Float64Array,
    work: Work,
    variant: Variant,
) -> Market:
    """A market without senders."""
    return Market(
        board,
        segments,
        fleet,
        links,
        no_senders(links),
        cap,
        work.receives,
        work.pair_rate,
        variant,
        np.empty(ATTEMPTS, dtype=np.int64),
        np.empty((len(board.held) + len(board.own), 2), dtype=np.int64),
    )


@compiled_leaf
def find_best(
    market: Market, rules: CutRules, receiver: int, room_pairs: float, n_failed: int
) -> Candidate:
    """The best chunk that fits into ``room_pairs``; the first ``n_failed`` of ``market.failed`` do
    not count.

    Senders near the receiver, or whose keys it has, come first; then the others, the most urgent
    first, until a chunk is found as good as any of them could offer.
    """
    senders, links, variant = market.senders, market.links, market.variant
    best = Candidate(-1, -1, 0.0, 0.0)
    full = _ideal(rules, room_pairs, math.inf)
    n_held = _list_held(market, receiver)
    senders.counts[N_VISITS] += 1
    visit = senders.counts[N_VISITS]
    host = links.server_host[receiver]
    first, last = senders.host_first[host], senders.host_first[host + 1]
    if last - first > 1:
        for k in range(first, last):
            sender = senders.of_host[k]
            if senders.need[sender] > 0.0:
                weight = links.near / (senders.urgency[sender] * factor(variant, sender, receiver))
                best, _ = _best_of(
                    market, rules, sender, room_pairs, full, weight, best, n_failed, n_held
                )
    segments = market.segments
    for h in range(n_held):
        document = market.held[h, DOCUMENT]
        first, last = segments.first_of_document[document], segments.first_of_document[document + 1]
        for i in range(first, last):
            sender = market.fleet.server_of_rank[segments.rank[i]]
            if sender >= 0 and senders.need[sender] > 0.0 and senders.visited[sender] != visit:
                near = links.server_host[sender] == host
                weight = links.near if near else links.far
                weight /= senders.urgency[sender] * factor(variant, sender, receiver)
                best, _ = _best_of(
                    market, rules, sender, room_pairs, full, weight, best, n_failed, n_held
                )
    enough = math.sqrt(room_pairs) * rules.ideal / links.far
    enough *= (1.0 + variant.spread) * AS_GOOD
    for k in range(senders.counts[N_SENDERS]):
        weight = senders.far[k]
        if variant.spread == 0.0 and senders.bound[k] <= best.value * weight:
            continue
        sender = senders.server[k]
        if best.value >= enough * senders.urgency[sender]:
            # The others are no more urgent.
            break
        if variant.spread > 0.0:
            weight = links.far / (senders.urgency[sender] * factor(variant, sender, receiver))
        if senders.bound[k] <= best.value * weight or senders.visited[sender] == visit:
            continue
        best, most = _best_of(market, rules, sender, room_pairs, full, weight, best, n_failed, 0)
        if n_failed == 0:
            senders.bound[k] = most
    return best


@compiled_leaf
def _best_of(
    market: Market,
    rules: CutRules,
    sender: int,
    room_pairs: float,
    full: Ideal,
    weight: float,
    best: Candidate,
    n_failed: int,
    n_held: int,
) -> tuple[Candidate, float]:
    """The better of ``best`` and the sender's best chunk; and a bound on the pairs per byte of all
    its chunks, for a receiver that has none of its keys.

    Args:
        full: for a sender that wants to be rid of more than the receiver has room for.
        weight: cost of a byte.
        n_failed, n_held: how many of ``market.failed`` and ``market.held`` count.
    """
    senders, segments, free = market.senders, market.segments, market.board.free
    senders.visited[sender] = senders.counts[N_VISITS]
    need = senders.need[sender]
    most = 0.0
    ideal = full
    if need < max(room_pairs, full.useful):
        ideal = _ideal(rules, room_pairs, need)
    part = market.board.first_free[market.fleet.rank[sender]]
    while part >= 0:
        # No chunk that ends at `high` carries more pairs per byte than `bound`; parts further
        # down the list end earlier.
        low, high = free[part, BEGIN], free[part, END]
        bound = min(high * rules.peak, ideal.bound)
        resident = 0
        if n_held > 0:
            if high / rules.q_bytes <= best.value * weight:
                break
            document = segments.document[free[part, SEGMENT]]
            for h in range(n_held):
                if market.held[h, DOCUMENT] == document:
                    resident = market.held[h, KEYS_END]
            if resident > 0:
                bound = high / rules.q_bytes
        if bound <= best.value * weight:
            most = max(most, bound)
            if n_held == 0:
                break
        elif not _contains(market.failed, n_failed, part):
            value, end = ideal.value, ideal.end
            if low > 0 or resident > 0 or high < ideal.fits_from:
                whole = low == 0 and segments.whole[free[part, SEGMENT]]
                value, end = _value(rules, ideal, low, high, whole, resident, room_pairs, need)
            most = max(most, value)
            if value > best.value * weight:
                best = Candidate(sender, part, end, value / weight)
        part = free[part, NEXT]
    return best, most


@compiled_leaf
def _contains(values: Int64Array, n_values: int, wanted: int) -> bool:
    found = False
    for k in range(n_values):
        found |= values[k] == wanted
    return found


@compiled_leaf
def _list_held(market: Market, server: int) -> int:
    """Fills ``market.held`` for ``server``; returns how many documents there are."""
    board, held, rank = market.board, market.held, market.fleet.rank[server]
    n = 0
    if rank >= 0:
        for k in range(board.own_first[rank], board.own_first[rank + 1]):
            held[n, DOCUMENT], held[n, KEYS_END] = board.own[k, DOCUMENT], board.own[k, KEYS_END]
            n += 1
    i = board.first_held[server]
    while i >= 0:
        document, end = board.held[i, DOCUMENT], board.held[i, KEYS_END]
        for k in range(n):
            if held[k, DOCUMENT] == document:
                end = max(end, held[k, KEYS_END])
        held[n, DOCUMENT], held[n, KEYS_END] = document, end
        n += 1
        i = board.held[i, NEXT_HELD]
    return n


@compiled_leaf
def _value(
    rules: CutRules,
    ideal: Ideal,
    low: int,
    high: int,
    whole: bool,
    resident: int,
    room_pairs: float,
    need: float,
) -> tuple[float, float]:
    """Useful pairs per byte of the best chunk of the free part ``[low, high)``, and where it ends;
    0 if none fits. ``whole``: the part begins a document that lies on one rank."""
    held = 0.5 * (float(high) * high - float(low) * low)
    pairs = ideal.pairs
    if high - low < rules.min_tokens + rules.min_rest_tokens and held <= room_pairs:
        # Too short to be cut.
        pairs = held
    if held <= pairs:
        begin, end = float(low), float(high)
    else:
        end = best_end(ideal.end, low, high, resident, pairs)
        begin = max(begin_for_pairs(end, pairs), float(low))
        if end - begin < rules.min_tokens:
            if high - low < rules.min_tokens:
                if not whole:
                    return 0.0, 0.0
                begin, end = float(low), float(high)
            else:
                end = max(end, float(low + rules.min_tokens))
                begin = end - rules.min_tokens
            if 0.5 * (end * end - begin * begin) > room_pairs:
                # The shortest chunk is too much here, but may not be nearer to the beginning.
                end = room_pairs / rules.min_tokens + 0.5 * rules.min_tokens
                begin = end - rules.min_tokens
                if begin < low:
                    return 0.0, 0.0
    useful = min(0.5 * (end * end - begin * begin), need)
    moved = rules.q_bytes * (end - begin) + rules.kv_bytes * max(end - resident, 0.0)
    return useful / moved, end
