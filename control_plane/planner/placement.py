"""Placement of work that has no server at home: ranks without an in-place server that can run it.

All of it must travel, so its Q and O cost what they cost; what a plan can save is K and V, by
cutting as few documents as it can. What ends latest in its document goes first, whole, to the
server with the most room; what fits nowhere is cut from its end, so that what remains, and is
placed next, has the fewest keys.
"""

from __future__ import annotations

import numpy as np

from control_plane.planner.board import (
    BYTES,
    CHUNKS,
    COST,
    MOVED_WHOLE,
    Board,
    Segments,
    add_chunk,
    affordable,
    resident_end,
    server_seconds,
)
from control_plane.planner.chunk import CutRules, begin_for_seconds, with_shorter_chunks
from control_plane.planner.compiled import BoolArray, compiled_inner
from control_plane.planner.costs import Pace, causal_pairs, task_seconds
from control_plane.planner.exports import CAP_STEP, may_shorten
from control_plane.planner.fleet import Fleet, pace_of
from control_plane.planner.headroom import (
    Headroom,
    change_top,
    no_headroom,
    pop_headroom,
    push_headroom,
)
from control_plane.planner.links import Links, link_cost
from control_plane.planner.target_load import Work
from core_attention.arrays import Float64Array

LONG_SHARE = 0.25
"""The share of the cap above which documents are cut to fit in time where memory is limited: a cut
repeats keys, and a higher cap costs less than rows that do not fit."""
MOST_RAISES = 5000
"""How often the cap may rise before the rest counts as work that fits nowhere."""


@compiled_inner
def place_homeless(
    board: Board,
    segments: Segments,
    home_seconds: Float64Array,
    fleet: Fleet,
    rules: CutRules,
    links: Links,
    cap: Float64Array,
    work: Work,
) -> tuple[int, int]:
    """Places the homeless segments, which take ``home_seconds`` at speed 1.

    Where room runs out, pieces may be shorter, as in ``exports``; then the cap is raised in place.

    Returns:
        The segment and the end of the first part that fits on no server; (-1, 0) if all fit.
    """
    first_cap = cap.max()
    step = CAP_STEP * first_cap
    receives, pair_rate = work.receives, work.pair_rate
    one_profile = len(fleet.tables.layout) == 1
    raises = 0
    by_time = False
    headroom = no_headroom(len(cap))
    _fill_headroom(headroom, board, cap, receives, pair_rate, by_time)
    for segment in work.homeless:
        low, high = segments.begin[segment], segments.end[segment]
        if not by_time and _is_short(cap, receives, pair_rate, low, high):
            by_time = True
            _fill_headroom(headroom, board, cap, receives, pair_rate, by_time)
        if segments.whole[segment] and not fleet.is_limited:
            # Most work is many short documents: the same as below, without its calls.
            at = headroom.server[0]
            seconds = home_seconds[segment]
            if not one_profile:
                seconds = task_seconds(fleet.tables, fleet.profile[at], rules.phase, low, high)
            seconds /= fleet.speed[at]
            room = cap[at] - board.load[at] - seconds
            if room >= 0.0:
                board.server[segment] = at
                board.used[MOVED_WHOLE] += 1
                board.load[at] += seconds
                moved = (rules.q_bytes + rules.kv_bytes) * (high - low)
                board.spent[BYTES] += moved
                board.spent[COST] += moved * link_cost(links, segments.rank[segment], at)
                change_top(headroom, room if by_time else room / pair_rate[at])
                continue
        while high > low:
            if board.used[CHUNKS] >= len(board.chunks):
                return segment, high
            at, begin = _find_server(
                board, segments, fleet, rules, cap, receives, headroom, segment, low, high
            )
            if at < 0:
                risen = cap.max() - first_cap
                if not fleet.is_limited and may_shorten(rules, risen, first_cap):
                    rules = with_shorter_chunks(rules)
                    continue
                raises += 1
                shortest = max(low, high - rules.min_tokens)
                if raises > MOST_RAISES or not _anyone_could(
                    board, fleet, receives, shortest, high
                ):
                    return segment, high
                cap += step * max(1.0, raises / 50.0)
                _fill_headroom(headroom, board, cap, receives, pair_rate, by_time)
                continue
            link = link_cost(links, segments.rank[segment], at)
            add_chunk(board, segments, fleet, rules, segment, begin, high, at, link)
            room = cap[at] - board.load[at]
            push_headroom(headroom, at, room if by_time else room / pair_rate[at])
            high = begin
    return -1, 0


@compiled_inner
def _fill_headroom(
    headroom: Headroom,
    board: Board,
    cap: Float64Array,
    receives: BoolArray,
    pair_rate: Float64Array,
    by_time: bool,
) -> None:
    """Puts the receiving servers on the heap, by seconds or by query-key pairs."""
    headroom.size[0] = 0
    for server in range(len(cap)):
        if receives[server]:
            room = cap[server] - board.load[server]
            push_headroom(headroom, server, room if by_time else room / pair_rate[server])


@compiled_inner
def _is_short(
    cap: Float64Array, receives: BoolArray, pair_rate: Float64Array, low: int, high: int
) -> bool:
    """Return whether even the slowest server does ``[low, high)`` in a small share of its cap.

    Long documents go where the most work fits, so that they are cut least; short ones where the
    most time is left, so that servers of different speed finish together."""
    pairs = causal_pairs(low, high)
    for s in range(len(cap)):
        if receives[s] and pairs * pair_rate[s] > LONG_SHARE * cap[s]:
            return False
    return True


@compiled_inner
def _anyone_could(board: Board, fleet: Fleet, receives: BoolArray, begin: int, high: int) -> bool:
    """Return whether some server could take ``[begin, high)`` if the cap did not matter."""
    could = False
    for s in range(len(receives)):
        could |= receives[s] and affordable(board, fleet, begin, high, s, 0)
    return could


@compiled_inner
def _find_server(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    cap: Float64Array,
    receives: BoolArray,
    headroom: Headroom,
    segment: int,
    low: int,
    high: int,
) -> tuple[int, int]:
    """Takes the first server off the heap that can have ``[low, high)`` or the end of it.

    Returns:
        The server and where its chunk begins; (-1, 0), and the heap as it was, if none can.
    """
    passed = np.empty(headroom.size[0], dtype=np.int64)
    passed_room = np.empty(len(passed))
    n_passed = 0
    found, begin = -1, 0
    # A cut repeats keys on two servers, which memory can ill afford.
    cut_for_memory = fleet.is_limited and not _anyone_could(board, fleet, receives, low, high)
    while headroom.size[0] > 0:
        passed_room[n_passed] = headroom.room[0]
        s = pop_headroom(headroom)
        room = cap[s] - board.load[s]
        begin = _begin_within(pace_of(fleet, s, rules.phase), rules, low, high, room)
        if fleet.is_limited and low < begin < high:
            whole = server_seconds(fleet, s, rules.phase, low, high)
            if whole <= LONG_SHARE * cap[s]:
                begin = high
        if begin < high and not fleet.is_limited:
            found = s
            break
        if begin < high:
            resident = resident_end(board, fleet, segments.document[segment], s)
            if affordable(board, fleet, begin, high, s, resident):
                found = s
                break
            if cut_for_memory and board.rows[s] > high + rules.min_tokens:
                q = max(board.rows[s] - high, rules.min_tokens)
                begin = max(begin, high - q // rules.alignment * rules.alignment)
                if begin < high and affordable(board, fleet, begin, high, s, resident):
                    found = s
                    break
        passed[n_passed] = s
        n_passed += 1
        if not fleet.is_limited:
            # The others have less room.
            break
    for k in range(n_passed):
        push_headroom(headroom, passed[k], passed_room[k])
    return found, begin


@compiled_inner
def _begin_within(pace: Pace, rules: CutRules, low: int, high: int, room: float) -> int:
    """The begin of the longest chunk that ends at ``high`` and fits into ``room``, without pieces
    too short; ``high`` if there is none."""
    if room <= 0.0:
        return high
    begin = begin_for_seconds(pace, low, high, room, rules.alignment)
    if begin == low:
        return low
    if begin < low + rules.min_tokens:
        begin = low + rules.min_tokens
    return begin if high - begin >= rules.min_tokens else high
