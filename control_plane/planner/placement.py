"""Placement of work that has no server at home: ranks without an in-place server that can run it.

All of it must travel, so its Q and O cost what they cost; what a plan can save is K and V, by
cutting as few documents as it can. Longest first, each part goes whole to the server with the most
room; one that fits nowhere is cut from its end, so that what remains, and is placed next, has the
fewest keys.
"""

from __future__ import annotations

import heapq

import numpy as np

from control_plane.planner.board import (
    BYTES,
    CHUNKS,
    COST,
    Board,
    Limits,
    Segments,
    add_chunk,
    affordable,
    resident_end,
    server_seconds,
)
from control_plane.planner.chunk import CutRules, begin_for_seconds
from control_plane.planner.compiled import BoolArray, compiled_inner
from control_plane.planner.costs import causal_pairs, task_seconds
from control_plane.planner.exports import CAP_STEP, Links, link_cost
from control_plane.planner.fleet import Fleet
from core_attention.arrays import Float64Array, Int64Array

LONG_SHARE = 0.25
"""Where memory is limited, only documents above this share of the cap are cut to fit in time: a cut
repeats keys, and a higher cap costs less than rows that do not fit."""
MOST_RAISES = 5000
"""How often the cap may rise before the rest counts as work that fits nowhere."""


@compiled_inner
def place_homeless(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    limits: Limits,
    links: Links,
    cap: Float64Array,
    receives: BoolArray,
    pair_rate: Float64Array,
    homeless: Int64Array,
) -> tuple[int, int]:
    """Places the segments ``homeless`` (indices, most pairs first).

    The cap is raised in place where room runs out.

    Returns:
        The segment and the end of the first part that fits on no server; (-1, 0) if all fit.
    """
    step = CAP_STEP * cap.max()
    raises = 0
    # Locals, because compiled code counts references each time a structure is looked into.
    limited, tables, profile, speed = limits.active, fleet.tables, fleet.profile, fleet.speed
    load, used, spent, touched = board.load, board.used, board.spent, board.touched
    chunk_segment, chunk_server = board.chunk_segment, board.chunk_server
    chunk_begin, chunk_end = board.chunk_begin, board.chunk_end
    whole_of, rank_of = segments.whole, segments.rank
    rank_host, server_host = links.rank_host, links.server_host
    by_time = False
    heap = _by_room(board, cap, receives, pair_rate, by_time)
    for segment in homeless:
        low, high = segments.begin[segment], segments.end[segment]
        if not by_time and _is_short(cap, receives, pair_rate, low, high):
            by_time = True
            heap = _by_room(board, cap, receives, pair_rate, by_time)
        at = heap[0][1]
        if whole_of[segment] and not limited and used[CHUNKS] < len(chunk_segment):
            # Most work is many short documents: the same as below, without its calls.
            seconds = task_seconds(tables, profile[at], rules.phase, low, high) / speed[at]
            room = cap[at] - load[at] - seconds
            if room >= 0.0:
                n = used[CHUNKS]
                used[CHUNKS] = n + 1
                chunk_segment[n], chunk_server[n] = segment, at
                chunk_begin[n], chunk_end[n] = low, high
                touched[segment] = True
                load[at] += seconds
                moved = (rules.q_bytes + rules.kv_bytes) * (high - low)
                spent[BYTES] += moved
                near = rank_host[rank_of[segment]]
                spent[COST] += moved * (
                    links.near if near >= 0 and near == server_host[at] else links.far
                )
                heapq.heapreplace(heap, (-room if by_time else -room / pair_rate[at], at))
                continue
        while high > low:
            if board.used[CHUNKS] >= len(board.chunk_segment):
                return segment, high
            at, begin = _find_server(
                board, segments, fleet, rules, limits, cap, receives, heap, segment, low, high
            )
            if at < 0:
                raises += 1
                shortest = max(low, high - rules.min_tokens)
                if raises > MOST_RAISES or not _anyone_could(
                    segments, fleet, limits, receives, segment, shortest, high
                ):
                    return segment, high
                cap[cap > 0.0] += step * max(1.0, raises / 50.0)
                heap = _by_room(board, cap, receives, pair_rate, by_time)
                continue
            link = link_cost(links, segments.rank[segment], at)
            add_chunk(board, segments, fleet, rules, limits, segment, begin, high, at, link)
            room = cap[at] - board.load[at]
            heapq.heappush(heap, (-room if by_time else -room / pair_rate[at], at))
            high = begin
    return -1, 0


@compiled_inner
def _by_room(
    board: Board, cap: Float64Array, receives: BoolArray, pair_rate: Float64Array, by_time: bool
) -> list[tuple[float, int]]:
    """A heap of the receiving servers, most room first, in seconds or in query-key pairs.

    Ties go by index, so that the order is the same everywhere."""
    heap = [(0.0, -1)]
    heap.pop()
    for s in range(len(cap)):
        if receives[s]:
            room = cap[s] - board.load[s]
            heap.append((-room if by_time else -room / pair_rate[s], s))
    heapq.heapify(heap)
    return heap


@compiled_inner
def _is_short(
    cap: Float64Array, receives: BoolArray, pair_rate: Float64Array, low: int, high: int
) -> bool:
    """Whether even the slowest server does ``[low, high)`` in a small share of its cap.

    Long documents go where the most work fits, so that they are cut least; short ones where the
    most time is left, so that servers of different speed finish together."""
    pairs = causal_pairs(low, high)
    for s in range(len(cap)):
        if receives[s] and pairs * pair_rate[s] > LONG_SHARE * cap[s]:
            return False
    return True


@compiled_inner
def _anyone_could(
    segments: Segments,
    fleet: Fleet,
    limits: Limits,
    receives: BoolArray,
    segment: int,
    begin: int,
    high: int,
) -> bool:
    """Whether some server could take ``[begin, high)`` if the cap did not matter."""
    for s in range(len(receives)):
        if receives[s] and affordable(segments, fleet, limits, segment, begin, high, s, 0):
            return True
    return False


@compiled_inner
def _find_server(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    limits: Limits,
    cap: Float64Array,
    receives: BoolArray,
    heap: list[tuple[float, int]],
    segment: int,
    low: int,
    high: int,
) -> tuple[int, int]:
    """Takes the first server off ``heap`` that can have ``[low, high)`` or the end of it.

    Returns:
        The server and where its chunk begins; (-1, 0), and the heap as it was, if none can.
    """
    passed = [(0.0, -1)]
    passed.pop()
    found, begin = -1, 0
    # A cut repeats keys on two servers, which memory can ill afford.
    cut_for_memory = limits.active and not _anyone_could(
        segments, fleet, limits, receives, segment, low, high
    )
    while len(heap):
        entry = heapq.heappop(heap)
        s = entry[1]
        room = cap[s] - board.load[s]
        begin = _begin_within(segments, fleet, rules, segment, low, high, s, room)
        if limits.active and low < begin < high:
            whole = server_seconds(fleet, s, rules.phase, low, high)
            if whole <= LONG_SHARE * cap[s]:
                begin = high
        if begin < high and not limits.active:
            found = s
            break
        if begin < high:
            resident = resident_end(board, fleet, segments.document[segment], s)
            if affordable(segments, fleet, limits, segment, begin, high, s, resident):
                found = s
                break
            if cut_for_memory and limits.rows[s] > high + rules.min_tokens:
                q = max(limits.rows[s] - high, rules.min_tokens)
                begin = max(begin, high - q // rules.alignment * rules.alignment)
                if begin < high and affordable(
                    segments, fleet, limits, segment, begin, high, s, resident
                ):
                    found = s
                    break
        passed.append(entry)
        if not limits.active:
            # The others have less room.
            break
    for entry in passed:
        heapq.heappush(heap, entry)
    return found, begin


@compiled_inner
def _begin_within(
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    segment: int,
    low: int,
    high: int,
    server: int,
    room: float,
) -> int:
    """Where the longest chunk that ends at ``high`` and fits into ``room`` begins, without pieces
    too short; ``high`` if there is none."""
    if room <= 0.0:
        return high
    limit = room * fleet.speed[server]
    begin = begin_for_seconds(
        fleet.tables, fleet.profile[server], rules.phase, low, high, limit, rules.alignment
    )
    if begin == low:
        return low
    if begin < low + rules.min_tokens:
        begin = low + rules.min_tokens
    return begin if high - begin >= rules.min_tokens else high


@compiled_inner
def by_pairs(segments: Segments, chosen: BoolArray) -> Int64Array:
    """The chosen segments, most query-key pairs first."""
    picked = np.flatnonzero(chosen)
    pairs = np.empty(len(picked))
    for k in range(len(picked)):
        begin, end = float(segments.begin[picked[k]]), float(segments.end[picked[k]])
        pairs[k] = begin * begin - end * end
    return picked[np.argsort(pairs, kind="mergesort")]
