"""Relief of memory: in-place servers whose own rank's rows exceed what they can hold."""

from __future__ import annotations

import numpy as np

from control_plane.planner.board import (
    BEGIN,
    CHUNKS,
    END,
    NEXT,
    SEGMENT,
    Board,
    Segments,
    add_chunk,
    add_free,
    affordable,
    remove_free,
    resident_end,
    server_seconds,
)
from control_plane.planner.chunk import CutRules
from control_plane.planner.compiled import BoolArray, compiled_inner
from control_plane.planner.fleet import Fleet
from control_plane.planner.links import Links, link_cost
from core_attention.arrays import Float64Array


@compiled_inner
def relieve_memory(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    links: Links,
    cap: Float64Array,
    receives: BoolArray,
) -> int:
    """Exports documents, or their ends, until every server can hold what it has.

    Returns:
        A server that cannot be relieved, because no other one can hold more; -1 if all are.
    """
    for s in range(len(cap)):
        while board.rows[s] < 0:
            if fleet.rank[s] < 0 or board.used[CHUNKS] >= len(board.chunks):
                return s
            if not _give_away(board, segments, fleet, rules, links, cap, receives, s):
                return s
    return -1


@compiled_inner
def _give_away(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    links: Links,
    cap: Float64Array,
    receives: BoolArray,
    server: int,
) -> bool:
    """Exports the part that frees a missing row for the fewest bytes; False if none can go."""
    rank, missing = fleet.rank[server], -board.rows[server]
    best_cost, best_part, best_begin, best_to = np.inf, -1, 0, -1
    part = board.first_free[rank]
    while part >= 0:
        low, high = board.free[part, BEGIN], board.free[part, END]
        # Without its last queries, a server needs neither them nor the keys at their positions.
        queries = max(missing // 2 + 1, rules.min_tokens)
        begin = (high - queries) // rules.alignment * rules.alignment
        if begin < low + rules.min_rest_tokens:
            begin = low
        freed = min(2 * (high - begin), missing)
        cost = (rules.q_bytes * (high - begin) + rules.kv_bytes * high) / freed
        if cost < best_cost:
            to = _holder(board, segments, fleet, cap, receives, server, part, begin)
            if to >= 0:
                best_cost, best_part, best_begin, best_to = cost, part, begin, to
        part = board.free[part, NEXT]
    if best_part < 0:
        return False
    segment, low = board.free[best_part, SEGMENT], board.free[best_part, BEGIN]
    high = board.free[best_part, END]
    remove_free(board, rank, best_part)
    board.load[server] -= server_seconds(fleet, server, rules.phase, low, high)
    if best_begin > low:
        add_free(board, rank, segment, low, best_begin)
        board.load[server] += server_seconds(fleet, server, rules.phase, low, best_begin)
    link = link_cost(links, rank, best_to)
    add_chunk(board, segments, fleet, rules, segment, best_begin, high, best_to, link)
    # The keys below stay needed by the rest of the document, if there is any.
    keys = high - best_begin if best_begin > low or low > 0 else high
    board.rows[server] += high - best_begin + keys
    return True


@compiled_inner
def _holder(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    cap: Float64Array,
    receives: BoolArray,
    giver: int,
    part: int,
    begin: int,
) -> int:
    """The server with the most room that can hold ``[begin, end)`` of a free part; -1 if none."""
    segment, end = board.free[part, SEGMENT], board.free[part, END]
    found, most = -1, -np.inf
    for s in range(len(receives)):
        if s == giver or not receives[s] or cap[s] - board.load[s] <= most:
            continue
        resident = resident_end(board, fleet, segments.document[segment], s)
        if affordable(board, fleet, begin, end, s, resident):
            found, most = s, cap[s] - board.load[s]
    return found
