"""Exports: servers above their cap give chunks to servers below it, until none is above.

The receiver with the most room comes first and takes, from all servers above the cap, the chunk
with the most useful work per byte (weighted by link), as large as its room allows. So chunks are
few and large, about one per receiver, and the receivers with the least room, which would take the
most bytes per unit of work, are left alone as long as the tolerance allows. When no receiver can
take anything any more, the cap rises a little for all.
"""

from __future__ import annotations

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
    ALIGNMENT_TOKENS,
    CutRules,
    begin_for_pairs,
    begin_for_seconds,
    best_end,
)
from control_plane.planner.compiled import BoolArray, compiled_inner
from control_plane.planner.fleet import Fleet
from core_attention.arrays import Float64Array, Int64Array

SLACK = 1e-3
"""A donor this close to the cap, as a share of it, is left alone."""
CAP_STEP = 2e-3
"""By how much of the mean load the cap rises when room has run out."""
MOST_FAILURES = 8
"""Receivers in a row that can take nothing, the ones with the most room, before the cap rises."""
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
    """

    seed: int
    spread: float


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
    while True:
        n_donors = 0
        for s in range(n_servers):
            if board.load[s] > cap[s] + slack and fleet.rank[s] >= 0:
                donors[n_donors] = s
                n_donors += 1
        if n_donors == 0:
            return raised
        receiver, most = -1, slack
        for s in range(n_servers):
            room = (cap[s] - board.load[s]) * _factor(variant, s, n_servers)
            if receives[s] and not exhausted[s] and room > most:
                receiver, most = s, room
        if board.count[CHUNKS] >= room_for_chunks or raised > 4.0 * board.load.max():
            return np.inf
        if receiver < 0 or failures == MOST_FAILURES:
            rise = max(step, 0.25 * raised)
            raised += rise
            cap[cap > 0.0] += rise
            exhausted[:] = False
            failures = 0
            continue
        for k in range(n_donors):
            surplus[k] = board.load[donors[k]] - cap[donors[k]]
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
    receiver: int,
) -> bool:
    """Gives ``receiver`` the best chunk of all; False if there is none that it can take."""
    room_pairs = (cap[receiver] - board.load[receiver]) / pair_rate[receiver]
    held_document, held_end = _held(board, fleet.rank[receiver], receiver)
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
        part = first_free[rank]
        while part >= 0:
            # No chunk that ends at `high` carries more pairs per byte than `bound`; parts further
            # down the list end earlier.
            low, high = free_begin[part], free_end[part]
            bound = high * rules.peak
            resident = 0
            if len(held_document):
                if high / rules.q_bytes <= best_value * weight:
                    break
                document = document_of[free_segment[part]]
                for h in range(len(held_document)):
                    if held_document[h] == document:
                        resident = held_end[h]
                if resident > 0:
                    bound = high / rules.q_bytes
            if bound > best_value * weight:
                whole = low == 0 and whole_of[free_segment[part]]
                value, end = _value(rules, low, high, whole, resident, room_pairs, need)
                if value > best_value * weight:
                    best_value, best_donor, best_part, best_at_end = value / weight, k, part, end
            elif len(held_document) == 0:
                break
            part = next_free[part]
    if best_part < 0:
        return False
    donor = donors[best_donor]
    return _take(
        board,
        segments,
        fleet,
        rules,
        limits,
        links,
        cap,
        receiver,
        donor,
        best_part,
        best_at_end,
        surplus[best_donor],
    )


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
) -> bool:
    """Cuts the chunk that ends near ``at_end`` out of a free part, by true seconds; False if no
    chunk there keeps all limits."""
    segment = board.free_segment[part]
    low, high = board.free_begin[part], board.free_end[part]
    rank = fleet.rank[donor]
    room = cap[receiver] - board.load[receiver]
    resident = resident_end(board, fleet, segments.document[segment], receiver)
    for _ in range(SHRINKS):
        begin, end = _fit(
            board, segments, fleet, rules, part, at_end, room, surplus, receiver, donor
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


@compiled_inner
def _fit(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    part: int,
    at_end: float,
    room: float,
    surplus: float,
    receiver: int,
    donor: int,
) -> tuple[int, int]:
    """The chunk of a free part that ends near ``at_end``, takes the receiver at most ``room`` and
    relieves the donor of ``surplus`` where that is possible; empty if none fits.

    The bytes of a chunk hardly change when it shifts by half its length, so it shifts to the
    beginning or the end of the part where it would leave less than that behind.
    """
    low, high = board.free_begin[part], board.free_end[part]
    whole = (
        segments.whole[board.free_segment[part]]
        and high - low == segments.end[board.free_segment[part]]
    )
    shortest = min(rules.min_tokens, high - low) if whole else rules.min_tokens
    end = min(round(at_end / ALIGNMENT_TOKENS) * ALIGNMENT_TOKENS, high)
    if end <= low:
        end = high
    begin = _begin_of_chunk(fleet, rules, receiver, donor, low, end, high, room, surplus, shortest)
    near = max((end - begin) // 2, rules.min_rest_tokens)
    left, right = begin - low, high - end
    if 0 < left < near and (right == 0 or left <= right):
        begin = low
        end = _end_of_chunk(fleet, rules, receiver, donor, low, high, room, surplus, shortest)
    elif 0 < right < near:
        end = high
        begin = _begin_of_chunk(
            fleet, rules, receiver, donor, low, high, high, room, surplus, shortest
        )
    if 0 < begin - low < rules.min_rest_tokens:
        begin = low + rules.min_rest_tokens
    if 0 < high - end < rules.min_rest_tokens:
        end = high - rules.min_rest_tokens
    if end - begin < max(shortest, 1):
        return 0, 0
    return begin, end


@compiled_inner
def _begin_of_chunk(
    fleet: Fleet,
    rules: CutRules,
    receiver: int,
    donor: int,
    low: int,
    end: int,
    high: int,
    room: float,
    surplus: float,
    shortest: int,
) -> int:
    """Where the chunk of ``[low, high)`` that ends at ``end`` begins: it fills the room, or takes
    the surplus, whichever is less; ``end`` if even the shortest does not fit."""
    phase = rules.phase
    earliest = begin_for_seconds(
        fleet.tables, fleet.profile[receiver], phase, low, end, room * fleet.speed[receiver]
    )
    if end - earliest < shortest:
        return end
    before = server_seconds(fleet, donor, phase, low, high)
    keep = before - surplus - server_seconds(fleet, donor, phase, end, high)
    wanted = _latest_end(fleet, donor, phase, low, end, keep)
    return max(earliest, min(wanted, end - shortest))


@compiled_inner
def _end_of_chunk(
    fleet: Fleet,
    rules: CutRules,
    receiver: int,
    donor: int,
    low: int,
    high: int,
    room: float,
    surplus: float,
    shortest: int,
) -> int:
    """The same for a chunk that begins at ``low``: where it ends; ``low`` if none fits."""
    phase = rules.phase
    latest = _latest_end(fleet, receiver, phase, low, high, room)
    if latest - low < shortest:
        return low
    keep = server_seconds(fleet, donor, phase, low, high) - surplus
    wanted = begin_for_seconds(
        fleet.tables, fleet.profile[donor], phase, low, high, keep * fleet.speed[donor]
    )
    return min(latest, max(wanted, low + shortest))


@compiled_inner
def _latest_end(fleet: Fleet, server: int, phase: int, low: int, high: int, seconds: float) -> int:
    """The last end in ``(low, high]`` such that ``[low, end)`` takes the server at most
    ``seconds``; aligned, or ``high``. ``low`` if there is none."""
    if seconds <= 0.0:
        return low
    if server_seconds(fleet, server, phase, low, high) <= seconds:
        return high
    first, last = low // ALIGNMENT_TOKENS, high // ALIGNMENT_TOKENS
    while first < last:
        middle = (first + last + 1) // 2
        if server_seconds(fleet, server, phase, low, middle * ALIGNMENT_TOKENS) <= seconds:
            first = middle
        else:
            last = middle - 1
    return max(first * ALIGNMENT_TOKENS, low)
