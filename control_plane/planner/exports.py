"""Exports: servers above their cap give chunks to servers below it, until none is above.

The receiver with the most room comes first and takes, from all servers above the cap, the chunk
with the most useful work per byte (weighted by link), as large as its room allows. So chunks are
few and large, about one per receiver, and the receivers with the least room, which would take the
most bytes per unit of work, are left alone as long as the tolerance allows. When no receiver can
take anything any more, the cap rises a little for all.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from control_plane.planner.board import (
    CHUNKS,
    Board,
    Limits,
    Segments,
    add_chunk,
    add_free,
    affordable,
    remove_free,
    resident_end,
    server_seconds,
)
from control_plane.planner.chunk import (
    CutRules,
    begin_for_pairs,
    best_end,
    with_shortest_chunks,
)
from control_plane.planner.compiled import BoolArray, compiled_inner
from control_plane.planner.fit import fit_best
from control_plane.planner.fleet import Fleet
from core_attention.arrays import Float64Array, Int64Array

SLACK = 1e-3
"""A donor this close to the cap, as a share of it, is left alone."""
CAP_STEP = 2e-3
"""By how much of the mean load the cap rises when room has run out."""
MOST_FAILURES = 8
"""Receivers in a row that can take nothing, the ones with the most room, before the cap rises."""
ATTEMPTS = 6
"""Parts that a receiver tries: the estimate that ranks them does not see every rule of cuts."""
SHRINKS = 5
"""How often a chunk that breaks a memory or byte limit is halved before it is given up."""


class Links(NamedTuple):
    """Cost of a byte between a rank and a server.

    Attributes:
        rank_host: ``[n_ranks]`` index of the rank's machine, -1 if unknown.
        server_host: ``[n_servers]`` index of the server's machine.
        near, far: cost of a byte inside a machine and between two.
    """

    rank_host: Int64Array
    server_host: Int64Array
    near: float
    far: float


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


@compiled_inner
def link_cost(links: Links, rank: int, server: int) -> float:
    """Cost of a byte between ``rank`` and ``server``."""
    host = links.rank_host[rank]
    return links.near if host >= 0 and host == links.server_host[server] else links.far


@compiled_inner
def _factor(variant: Variant, i: int, j: int) -> float:
    """A factor near 1 that depends on the variant and two indices only."""
    if variant.spread == 0.0:
        return 1.0
    x = (variant.seed * 2654435761 + i * 40503 + j * 2246822519 + 374761393) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 2246822519) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 3266489917) & 0xFFFFFFFF
    x ^= x >> 16
    return 1.0 + variant.spread * (2.0 * x / 4294967295.0 - 1.0)


@compiled_inner
def export_surplus(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    limits: Limits,
    links: Links,
    cap: Float64Array,
    receives: BoolArray,
    pair_rate: Float64Array,
    variant: Variant,
) -> float:
    """Moves work until no server is above its cap.

    Args:
        cap: ``[n_servers]`` seconds; raised in place where it must be.
        receives: ``[n_servers]`` who may take work.
        pair_rate: ``[n_servers]`` typical seconds per query-key pair, speed included.

    Returns:
        By how many seconds the cap was raised; infinity if work is left that nobody can take.
    """
    n_servers = len(cap)
    room_for_chunks = len(board.chunk_segment)
    slack = SLACK * cap.max()
    step = CAP_STEP * cap.max()
    raised = 0.0
    exhausted = np.zeros(n_servers, dtype=np.bool_)
    failures = 0
    donors = np.empty(n_servers, dtype=np.int64)
    surplus = np.empty(n_servers)
    # Most pairs per byte that a donor can still give: rooms and needs only shrink, so what was
    # found once bounds what will be found later.
    value_bound = np.full(n_servers, np.inf)
    # Locals, because compiled code counts references each time a structure is looked into.
    load, rank = board.load, fleet.rank
    while True:
        n_donors = 0
        for s in range(n_servers):
            if load[s] > cap[s] + slack and rank[s] >= 0:
                donors[n_donors] = s
                n_donors += 1
        if n_donors == 0:
            return raised
        receiver, most = -1, slack
        for s in range(n_servers):
            if receives[s] and not exhausted[s]:
                room = (cap[s] - load[s]) * _factor(variant, s, n_servers)
                if room > most:
                    receiver, most = s, room
        if board.used[CHUNKS] >= room_for_chunks or raised > 4.0 * load.max():
            return np.inf
        if receiver < 0 or failures == MOST_FAILURES:
            exhausted[:] = False
            failures = 0
            value_bound[:] = np.inf
            if rules.min_tokens > rules.min_rest_tokens:
                rules = with_shortest_chunks(rules)
                continue
            rise = max(step, 0.25 * raised)
            raised += rise
            cap[cap > 0.0] += rise
            continue
        for k in range(n_donors):
            surplus[k] = load[donors[k]] - cap[donors[k]]
        done = _serve(
            board,
            segments,
            fleet,
            rules,
            limits,
            links,
            cap,
            pair_rate,
            variant,
            donors[:n_donors],
            surplus[:n_donors],
            value_bound,
            receiver,
        )
        exhausted[receiver] = not done
        failures = 0 if done else failures + 1


@compiled_inner
def _serve(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    limits: Limits,
    links: Links,
    cap: Float64Array,
    pair_rate: Float64Array,
    variant: Variant,
    donors: Int64Array,
    surplus: Float64Array,
    value_bound: Float64Array,
    receiver: int,
) -> bool:
    """Gives ``receiver`` the best chunk of all; False if there is none that it can take."""
    failed = np.full(ATTEMPTS, -1, dtype=np.int64)
    for attempt in range(ATTEMPTS):
        k, part, at_end = _find_best(
            board,
            segments,
            fleet,
            rules,
            links,
            cap,
            pair_rate,
            variant,
            donors,
            surplus,
            value_bound,
            receiver,
            failed[:attempt],
        )
        if part < 0:
            return False
        if _take(
            board,
            segments,
            fleet,
            rules,
            limits,
            links,
            cap,
            receiver,
            donors[k],
            part,
            at_end,
            surplus[k],
            variant.n_shifts,
        ):
            return True
        failed[attempt] = part
    return False


@compiled_inner
def _find_best(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    links: Links,
    cap: Float64Array,
    pair_rate: Float64Array,
    variant: Variant,
    donors: Int64Array,
    surplus: Float64Array,
    value_bound: Float64Array,
    receiver: int,
    failed: Int64Array,
) -> tuple[int, int, float]:
    """The donor (its place in ``donors``) and the free part of the chunk with the most useful work
    per byte, and where it ends; a part of -1 if there is none. ``failed`` parts do not count."""
    room_pairs = (cap[receiver] - board.load[receiver]) / pair_rate[receiver]
    held_document, held_end = _held(board, fleet.rank[receiver], receiver)
    holds_of = _homes_of(segments, held_document, len(fleet.server_of_rank))
    best_value, best_donor, best_part, best_at_end = 0.0, -1, -1, 0.0
    host = links.server_host[receiver]
    # Locals, because compiled code counts references each time a structure is passed on.
    first_free, next_free = board.first_free, board.next_free
    free_begin, free_end, free_segment = board.free_begin, board.free_end, board.free_segment
    ranks, rank_host = fleet.rank, links.rank_host
    document_of, whole_of = segments.document, segments.whole
    for k in range(len(donors)):
        donor = donors[k]
        rank = ranks[donor]
        need = surplus[k] / pair_rate[donor]
        near = rank_host[rank] >= 0 and rank_host[rank] == host
        weight = (links.near if near else links.far) / _factor(variant, donor, receiver)
        keys_are_here = holds_of[rank]
        if not keys_are_here and value_bound[donor] <= best_value * weight:
            continue
        most = 0.0
        # Nor does any chunk of at most these pairs, wherever it lies.
        ideal = math.sqrt(min(room_pairs, need)) * rules.ideal
        part = first_free[rank]
        while part >= 0:
            # No chunk that ends at `high` carries more pairs per byte than `bound`; parts further
            # down the list end earlier.
            low, high = free_begin[part], free_end[part]
            bound = min(high * rules.peak, ideal)
            resident = 0
            if keys_are_here:
                if high / rules.q_bytes <= best_value * weight:
                    break
                document = document_of[free_segment[part]]
                for h in range(len(held_document)):
                    if held_document[h] == document:
                        resident = held_end[h]
                if resident > 0:
                    bound = high / rules.q_bytes
            if bound > best_value * weight and not (failed == part).any():
                whole = low == 0 and whole_of[free_segment[part]]
                value, end = _value(rules, low, high, whole, resident, room_pairs, need)
                most = max(most, value)
                if value > best_value * weight:
                    best_value, best_donor, best_part, best_at_end = value / weight, k, part, end
            elif bound <= best_value * weight and not keys_are_here:
                most = max(most, bound)
                break
            part = next_free[part]
        if not keys_are_here and len(failed) == 0:
            value_bound[donor] = most
    return best_donor, best_part, best_at_end


@compiled_inner
def _homes_of(segments: Segments, documents: Int64Array, n_ranks: int) -> BoolArray:
    """``[n_ranks]`` whether a rank is home of a part of one of ``documents``."""
    is_home = np.zeros(n_ranks, dtype=np.bool_)
    for document in documents:
        i = np.searchsorted(segments.document, document)
        while i < len(segments.document) and segments.document[i] == document:
            is_home[segments.rank[i]] = True
            i += 1
    return is_home


@compiled_inner
def _held(board: Board, rank: int, server: int) -> tuple[Int64Array, Int64Array]:
    """The documents whose keys a server has beyond those whole on its rank, and up to where."""
    n = 0
    i = board.first_held[server]
    while i >= 0:
        n += 1
        i = board.next_held[i]
    first = board.own_first[rank] if rank >= 0 else 0
    last = board.own_first[rank + 1] if rank >= 0 else 0
    document, end = np.empty(n + last - first, np.int64), np.empty(n + last - first, np.int64)
    n = 0
    for k in range(first, last):
        document[n], end[n] = board.own_document[k], board.own_end[k]
        n += 1
    i = board.first_held[server]
    while i >= 0:
        document[n], end[n] = board.held_document[i], board.held_end[i]
        for k in range(n):
            if document[k] == document[n]:
                end[n] = max(end[n], end[k])
        n += 1
        i = board.next_held[i]
    return document, end


@compiled_inner
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


@compiled_inner
def _take(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    limits: Limits,
    links: Links,
    cap: Float64Array,
    receiver: int,
    donor: int,
    part: int,
    at_end: float,
    surplus: float,
    n_shifts: int,
) -> bool:
    """Cuts the chunk that ends near ``at_end`` out of a free part, by true seconds; False if no
    chunk there keeps all limits."""
    segment = board.free_segment[part]
    low, high = board.free_begin[part], board.free_end[part]
    rank = fleet.rank[donor]
    room = cap[receiver] - board.load[receiver]
    resident = resident_end(board, fleet, segments.document[segment], receiver)
    for _ in range(SHRINKS):
        begin, end = fit_best(
            board,
            segments,
            fleet,
            rules,
            part,
            at_end,
            room,
            surplus,
            receiver,
            donor,
            resident,
            n_shifts,
        )
        if end <= begin:
            return False
        if affordable(segments, fleet, limits, segment, begin, end, receiver, resident):
            remove_free(board, rank, part)
            board.load[donor] -= server_seconds(fleet, donor, rules.phase, low, high)
            if begin > low:
                add_free(board, rank, segment, low, begin)
                board.load[donor] += server_seconds(fleet, donor, rules.phase, low, begin)
            if end < high:
                add_free(board, rank, segment, end, high)
                board.load[donor] += server_seconds(fleet, donor, rules.phase, end, high)
            link = link_cost(links, rank, receiver)
            add_chunk(board, segments, fleet, rules, limits, segment, begin, end, receiver, link)
            return True
        room *= 0.5
        at_end = max(low + 0.7 * (at_end - low), float(low + rules.min_tokens))
    return False
