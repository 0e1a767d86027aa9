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
from control_plane.planner.chunk import CutRules, begin_for_pairs, best_end
from control_plane.planner.compiled import compiled_inner, compiled_leaf
from control_plane.planner.donors import N_DONORS, N_VISITS, Donors
from control_plane.planner.fleet import Fleet
from control_plane.planner.links import Links
from core_attention.arrays import Int64Array

AS_GOOD = 1.0 - 1e-9
"""A chunk whose value is this close to the most that any could have ends the search."""


class Variant(NamedTuple):
    """A way to break near-ties, so that several plans can be made and the best kept.

    Attributes:
        seed: of the pseudo-random factors.
        spread: the factors lie within ``1 - spread`` to ``1 + spread``; 0 for the plain plan.
        n_shifts: cuts to try on either side of each that the geometry proposes; they matter where
            documents are few steps of the grid of cuts long.
    """

    seed: int
    spread: float
    n_shifts: int


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
    """A chunk to be cut: its donor, the free part it lies in (-1: none), about where it ends, and
    its useful query-key pairs per byte, weighted by link."""

    donor: int
    part: int
    at_end: float
    value: float


@compiled_inner
def find_best(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    links: Links,
    donors: Donors,
    variant: Variant,
    receiver: int,
    room_pairs: float,
    failed: Int64Array,
) -> Candidate:
    """The best chunk that fits into ``room_pairs``; ``failed`` parts do not count.

    Donors near the receiver, or whose keys it has, come first; then the others, those with the
    most to give first, until a chunk is found as good as any of them could offer.
    """
    best = Candidate(-1, -1, 0.0, 0.0)
    held = _held(board, fleet.rank[receiver], receiver)
    special = _special(segments, fleet, links, donors, held, receiver)
    donors.counts[N_VISITS] += 1
    visit = donors.counts[N_VISITS]
    for donor in special:
        if donors.visited[donor] == visit:
            continue
        donors.visited[donor] = visit
        near = links.near if links.server_host[donor] == links.server_host[receiver] else links.far
        best, _ = _best_of(
            board.free,
            board.first_free[fleet.rank[donor]],
            segments.document,
            segments.whole,
            rules,
            held,
            donor,
            donors.need[donor],
            room_pairs,
            near / factor(variant, donor, receiver),
            best,
            failed,
        )
    n_donors = donors.counts[N_DONORS]
    if n_donors == 0:
        return best
    most_need = donors.need[donors.server[0]]
    enough = math.sqrt(min(room_pairs, most_need)) * rules.ideal / links.far
    enough *= (1.0 + variant.spread) * AS_GOOD
    nothing_held = held[:0]
    for k in range(n_donors):
        if best.value >= enough:
            break
        donor = donors.server[k]
        if donors.visited[donor] == visit:
            continue
        weight = links.far / factor(variant, donor, receiver)
        if donors.bound[donor] <= best.value * weight:
            continue
        best, most = _best_of(
            board.free,
            board.first_free[fleet.rank[donor]],
            segments.document,
            segments.whole,
            rules,
            nothing_held,
            donor,
            donors.need[donor],
            room_pairs,
            weight,
            best,
            failed,
        )
        if len(failed) == 0:
            donors.bound[donor] = most
    return best


@compiled_leaf
def _best_of(
    free: Int64Array,
    first: int,
    document_of: Int64Array,
    whole_of: np.ndarray[tuple[int], np.dtype[np.bool_]],
    rules: CutRules,
    held: Int64Array,
    donor: int,
    need: float,
    room_pairs: float,
    weight: float,
    best: Candidate,
    failed: Int64Array,
) -> tuple[Candidate, float]:
    """The better of ``best`` and the donor's best chunk; and a bound on the pairs per byte of all
    its chunks, for a receiver that has none of its keys.

    Args:
        first: head of the donor's free parts.
        held: ``[n, 2]`` documents, and up to where the receiver has their keys.
        weight: cost of a byte.
    """
    most = 0.0
    # No chunk of at most these pairs is better, wherever it lies.
    ideal = math.sqrt(min(room_pairs, need)) * rules.ideal
    part = first
    while part >= 0:
        # No chunk that ends at `high` carries more pairs per byte than `bound`; parts further
        # down the list end earlier.
        low, high = free[part, BEGIN], free[part, END]
        bound = min(high * rules.peak, ideal)
        resident = 0
        if len(held):
            if high / rules.q_bytes <= best.value * weight:
                break
            document = document_of[free[part, SEGMENT]]
            for h in range(len(held)):
                if held[h, DOCUMENT] == document:
                    resident = held[h, KEYS_END]
            if resident > 0:
                bound = high / rules.q_bytes
        if bound <= best.value * weight:
            most = max(most, bound)
            if not len(held):
                break
        elif not _contains(failed, part):
            whole = low == 0 and whole_of[free[part, SEGMENT]]
            value, end = _value(rules, low, high, whole, resident, room_pairs, need)
            most = max(most, value)
            if value > best.value * weight:
                best = Candidate(donor, part, end, value / weight)
        part = free[part, NEXT]
    return best, most


@compiled_leaf
def _contains(values: Int64Array, wanted: int) -> bool:
    found = False
    for value in values:
        found |= value == wanted
    return found


@compiled_inner
def _special(
    segments: Segments,
    fleet: Fleet,
    links: Links,
    donors: Donors,
    held: Int64Array,
    receiver: int,
) -> Int64Array:
    """The donors on the receiver's machine, and those that are home of a part of a document whose
    keys it has; some of them twice."""
    host = links.server_host[receiver]
    first, last = donors.host_first[host], donors.host_first[host + 1]
    n = last - first if last - first > 1 else 0
    for h in range(len(held)):
        i = np.searchsorted(segments.document, held[h, DOCUMENT])
        while i < len(segments.document) and segments.document[i] == held[h, DOCUMENT]:
            n += 1
            i += 1
    found = np.empty(n, dtype=np.int64)
    n = 0
    if last - first > 1:
        for k in range(first, last):
            if donors.need[donors.of_host[k]] > 0.0:
                found[n] = donors.of_host[k]
                n += 1
    for h in range(len(held)):
        i = np.searchsorted(segments.document, held[h, DOCUMENT])
        while i < len(segments.document) and segments.document[i] == held[h, DOCUMENT]:
            server = fleet.server_of_rank[segments.rank[i]]
            if server >= 0 and donors.need[server] > 0.0:
                found[n] = server
                n += 1
            i += 1
    return found[:n]


@compiled_inner
def _held(board: Board, rank: int, server: int) -> Int64Array:
    """``[n, 2]`` the documents whose keys a server has beyond those whole on its rank, and up to
    where."""
    n = 0
    i = board.first_held[server]
    while i >= 0:
        n += 1
        i = board.held[i, NEXT_HELD]
    first = board.own_first[rank] if rank >= 0 else 0
    last = board.own_first[rank + 1] if rank >= 0 else 0
    found = np.empty((n + last - first, 2), dtype=np.int64)
    n = 0
    for k in range(first, last):
        found[n, DOCUMENT], found[n, KEYS_END] = board.own[k, DOCUMENT], board.own[k, KEYS_END]
        n += 1
    i = board.first_held[server]
    while i >= 0:
        document, end = board.held[i, DOCUMENT], board.held[i, KEYS_END]
        for k in range(n):
            if found[k, DOCUMENT] == document:
                end = max(end, found[k, KEYS_END])
        found[n, DOCUMENT], found[n, KEYS_END] = document, end
        n += 1
        i = board.held[i, NEXT_HELD]
    return found


@compiled_leaf
def _value(
    rules: CutRules,
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
    pairs = min(room_pairs, max(need, 1.0))
    if high - low < rules.min_tokens + rules.min_rest_tokens and held <= room_pairs:
        # Too short to be cut.
        pairs = held
    if held <= pairs:
        begin, end = float(low), float(high)
    else:
        end = best_end(rules, low, high, resident, pairs)
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
