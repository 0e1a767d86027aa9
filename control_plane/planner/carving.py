"""Carving: whoever is above its cap gives away ends of documents, each as large as a room.

The search for the best chunk (see ``exports``) leaves pieces of documents behind and rooms half
full. Where rooms are narrow next to what a few hundred queries of a giant document take, these
rests fit nowhere, and where thousands of short documents must move, a search for each takes long.
Carving knows no value: the latest keys go first, into the widest room, cut from the end so that it
is filled; one rest stays at home. Nothing is lost but what alignment takes, so it finds the
lowest cap that pieces allow, at the price of bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from control_plane.planner.board import (
    BEGIN,
    CHUNKS,
    END,
    FREE,
    NEXT,
    SEGMENT,
    Board,
    Limits,
    Segments,
    add_chunk,
    add_free,
    affordable,
    remove_free,
    resident_end,
)
from control_plane.planner.chunk import CutRules, begin_for_seconds
from control_plane.planner.compiled import BoolArray, compiled_inner, compiled_leaf
from control_plane.planner.costs import Pace, pace_seconds
from control_plane.planner.fit import latest_end
from control_plane.planner.fleet import Fleet
from control_plane.planner.level import Work
from control_plane.planner.links import Links, link_cost
from control_plane.planner.rooms import Rooms, no_rooms, pop_room, push_room
from core_attention.arrays import Float64Array, Int64Array

SLACK = 1e-3
"""A server this close to the cap, as a share of it, is left alone."""
MOST_PASSED = 8
"""Receivers that one piece tries, those with the most room, before its document stays."""
UNCUT_SHARE = 1.0 / 64.0
"""Documents that take less than this share of the cap are not cut: a cut repeats keys, and the gap
that one leaves in a room is smaller."""
NEXT_SIZE = 0.9
"""Where a document fits into no room, the donor goes on with the first that is shorter by this."""


class Carving(NamedTuple):
    """Who gives what to whom.

    Attributes:
        board, segments, fleet, limits, links: what there is, and where.
        cap: ``[n_servers]`` seconds of attention that each server may reach.
        slack: seconds that do not count.
        short_seconds: documents that take less are not cut.
        receives, pair_rate: ``[n_servers]`` of ``level.Work``.
        home_seconds: ``[n_segments]`` what each takes at home.
        rooms: who can take something, by query-key pairs.
        donors: who is above the cap, by where the document ends that it gives next.
        next_part: ``[n_servers]`` of donors, that document's free part.
        passed: ``[MOST_PASSED]`` receivers in whose rooms a piece did not fit.
        sums: ``[4]`` seconds that are left above caps, that donors are rid of, that receivers have
            got instead, and by which caps would have to rise before anything more fits.
        swaps: whether a server may get a piece for which it must give away documents of its own.
    """

    board: Board
    segments: Segments
    fleet: Fleet
    limits: Limits
    links: Links
    cap: Float64Array
    slack: float
    short_seconds: float
    receives: BoolArray
    pair_rate: Float64Array
    home_seconds: Float64Array
    rooms: Rooms
    donors: Rooms
    next_part: Int64Array
    passed: Int64Array
    sums: Float64Array
    swaps: bool


LEFT, RELIEVED, ADDED, NEEDED = 0, 1, 2, 3
"""Of ``Carving.sums``."""


@compiled_inner
def carve_surplus(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    limits: Limits,
    links: Links,
    cap: Float64Array,
    work: Work,
    home_seconds: Float64Array,
    swaps: bool,
) -> float:
    """Moves what is above ``cap`` as far as there is room.

    Args:
        swaps: whether a server may get a piece for which it must give away documents of its own.

    Returns:
        By how many seconds the cap would have to rise, about, so that all fits: 0 if it does,
        infinity if the board ran out of entries.
    """
    n = len(cap)
    carving = Carving(
        board,
        segments,
        fleet,
        limits,
        links,
        cap,
        SLACK * cap.max(),
        UNCUT_SHARE * cap.max(),
        work.receives,
        work.pair_rate,
        home_seconds,
        no_rooms(n),
        no_rooms(n),
        np.full(n, -1, dtype=np.int64),
        np.empty(MOST_PASSED, dtype=np.int64),
        np.array([0.0, 0.0, 0.0, math.inf]),
        swaps,
    )
    _carve(carving, rules)
    left, relieved = carving.sums[LEFT], carving.sums[RELIEVED]
    growth = carving.sums[ADDED] / relieved if relieved > 0.0 else 1.0
    rise: float = left * growth / max(work.receives.sum(), 1)
    if left > 0.0 and math.isfinite(carving.sums[NEEDED]):
        rise = max(rise, carving.sums[NEEDED])
    return rise


@compiled_leaf
def _carve(carving: Carving, rules: CutRules) -> None:
    """Until nobody is above the cap, or nothing fits any more."""
    board, donors, cap = carving.board, carving.donors, carving.cap
    free, load, slack = board.free, board.load, carving.slack
    for server in range(len(cap)):
        _offer(carving, server)
        rank = carving.fleet.rank[server]
        if rank >= 0 and load[server] > cap[server] + slack and board.first_free[rank] >= 0:
            carving.next_part[server] = board.first_free[rank]
            push_room(donors, server, float(free[board.first_free[rank], END]))
    while donors.size[0] > 0:
        if board.used[CHUNKS] >= len(board.chunks):
            carving.sums[LEFT] = math.inf
            return
        donor = pop_room(donors)
        after = _give(carving, rules, donor)
        over = load[donor] - cap[donor]
        if over <= slack or after < 0 or carving.rooms.size[0] == 0:
            carving.sums[LEFT] += over if over > slack else 0.0
            _offer(carving, donor)
        else:
            carving.next_part[donor] = after
            push_room(donors, donor, float(free[after, END]))


@compiled_leaf
def _give(carving: Carving, rules: CutRules, donor: int) -> int:
    """Gives away what the donor gives next, or the end of it, if it fits into some room; returns
    the free part that comes after it, -1 if there is none."""
    board, fleet, segments = carving.board, carving.fleet, carving.segments
    part = carving.next_part[donor]
    segment, low, high = board.free[part, SEGMENT], board.free[part, BEGIN], board.free[part, END]
    after = board.free[part, NEXT]
    gives = Pace(fleet.tables, fleet.profile[donor], rules.phase, fleet.speed[donor])
    whole = segments.whole[segment] and low == 0 and high == segments.end[segment]
    seconds = carving.home_seconds[segment] if whole else pace_seconds(gives, low, high)
    is_short = whole and seconds < carving.short_seconds
    surplus = board.load[donor] - carving.cap[donor]
    begin, n_passed = high, 0
    # Of a short document more than half must be surplus.
    while carving.rooms.size[0] > 0 and not (is_short and seconds > 2.0 * surplus):
        receiver = carving.rooms.server[0]
        begin = _begin_for(carving, rules, gives, receiver, part, seconds, surplus, whole, is_short)
        if begin < high:
            _move(carving, rules, gives, receiver, part, begin, seconds)
            if begin > low and (after < 0 or begin >= board.free[after, END]):
                after = board.used[FREE] - 1
            if not is_short or carving.cap[receiver] - board.load[receiver] <= carving.slack:
                # Of short documents it takes more until one does not fit.
                pop_room(carving.rooms)
                _offer(carving, receiver)
            break
        if n_passed == MOST_PASSED:
            break
        carving.passed[n_passed] = pop_room(carving.rooms)
        n_passed += 1
    for k in range(n_passed):
        _offer(carving, carving.passed[k])
    if begin == high:
        if not is_short and carving.rooms.size[0] > 0 and _swap(carving, rules, gives, part):
            rest = board.used[FREE] - 1
            return int(
                rest if after < 0 or board.free[rest, END] >= board.free[after, END] else after
            )
        while after >= 0 and board.free[after, END] > NEXT_SIZE * high:
            after = board.free[after, NEXT]
    return int(after)


@compiled_leaf
def _swap(carving: Carving, rules: CutRules, gives: Pace, part: int) -> bool:
    """Gives the shortest piece at the end of ``part`` to the server with the widest room, although
    it does not fit: documents of the server's own must go then. False if it may not, or has none;
    ``Carving.sums`` gets to know what was missing."""
    board, fleet, free = carving.board, carving.fleet, carving.board.free
    low, high, receiver = free[part, BEGIN], free[part, END], carving.rooms.server[0]
    takes = Pace(fleet.tables, fleet.profile[receiver], rules.phase, fleet.speed[receiver])
    q = rules.shortest_tokens
    if high - low < 2 * q:
        q = high - low
    seconds = pace_seconds(takes, high - q, high)
    missing = seconds - (carving.cap[receiver] - board.load[receiver])
    rank = fleet.rank[receiver]
    if not carving.swaps or rank < 0 or board.first_free[rank] < 0 or q == high - low:
        carving.sums[NEEDED] = min(carving.sums[NEEDED], max(missing, 0.0))
        return False
    if seconds > carving.cap[receiver]:
        carving.sums[NEEDED] = min(carving.sums[NEEDED], seconds - carving.cap[receiver])
        return False
    pop_room(carving.rooms)
    _move(carving, rules, gives, receiver, part, high - q, pace_seconds(gives, low, high))
    if board.load[receiver] > carving.cap[receiver] + carving.slack:
        carving.next_part[receiver] = board.first_free[rank]
        push_room(carving.donors, receiver, float(free[board.first_free[rank], END]))
    return True


@compiled_leaf
def _begin_for(
    carving: Carving,
    rules: CutRules,
    gives: Pace,
    receiver: int,
    part: int,
    seconds: float,
    surplus: float,
    whole: bool,
    is_short: bool,
) -> int:
    """Where what ``receiver`` takes of ``part``, which takes the donor ``seconds``, begins; its end
    if it takes nothing."""
    board, fleet, segments = carving.board, carving.fleet, carving.segments
    segment = board.free[part, SEGMENT]
    low, high = int(board.free[part, BEGIN]), int(board.free[part, END])
    takes = Pace(fleet.tables, fleet.profile[receiver], rules.phase, fleet.speed[receiver])
    room = carving.cap[receiver] - board.load[receiver]
    if is_short:
        taken = seconds * gives.speed / takes.speed
        if takes.profile != gives.profile:
            taken = pace_seconds(takes, low, high)
        begin = low if taken <= room else high
    else:
        begin = _begin_of_piece(rules, gives, takes, low, high, seconds, surplus, room, whole)
    if begin < high and carving.limits.active:
        resident = resident_end(board, fleet, segments.document[segment], receiver)
        if not affordable(
            segments, fleet, carving.limits, segment, begin, high, receiver, resident
        ):
            begin = high
    return begin


@compiled_leaf
def _move(
    carving: Carving,
    rules: CutRules,
    gives: Pace,
    receiver: int,
    part: int,
    begin: int,
    seconds: float,
) -> None:
    """Gives the part from ``begin`` on to ``receiver``."""
    board, fleet, segments = carving.board, carving.fleet, carving.segments
    segment, low, high = board.free[part, SEGMENT], board.free[part, BEGIN], board.free[part, END]
    rank = segments.rank[segment]
    relief, before = seconds - pace_seconds(gives, low, begin), board.load[receiver]
    remove_free(board, rank, part)
    board.load[fleet.server_of_rank[rank]] -= relief
    if begin > low:
        add_free(board, rank, segment, low, begin)
    link = link_cost(carving.links, rank, receiver)
    add_chunk(board, segments, fleet, rules, carving.limits, segment, begin, high, receiver, link)
    carving.sums[RELIEVED] += relief
    carving.sums[ADDED] += board.load[receiver] - before


@compiled_leaf
def _offer(carving: Carving, server: int) -> None:
    """Puts a server on the heap if it can take more than the slack."""
    room = carving.cap[server] - carving.board.load[server]
    if carving.receives[server] and room > carving.slack:
        push_room(carving.rooms, server, room / carving.pair_rate[server])


@compiled_leaf
def _begin_of_piece(
    rules: CutRules,
    donor: Pace,
    receiver: Pace,
    low: int,
    high: int,
    seconds: float,
    surplus: float,
    room: float,
    whole: bool,
) -> int:
    """Where the piece of ``[low, high)`` that ends at ``high`` begins: it fills the room or takes
    the surplus, whichever is less; ``high`` if none fits.

    Args:
        seconds: of ``[low, high)`` on the donor.
        whole: ``[low, high)`` is a whole document, which may move whatever its length.
    """
    shortest = rules.shortest_tokens
    earliest = begin_for_seconds(receiver, low, high, room, rules.alignment)
    if high - low < 2 * shortest:
        fits = earliest == low and (whole or high - low >= shortest)
        return low if fits else high
    if high - earliest < shortest:
        return high
    begin = earliest
    if seconds > surplus:
        wanted = latest_end(donor, low, high, seconds - surplus, rules.alignment)
        begin = max(earliest, min(wanted, high - shortest))
    if 0 < begin - low < rules.min_rest_tokens:
        # A short rest takes nearly as long as a longer one.
        begin = low if earliest == low else min(low + rules.min_rest_tokens, high - shortest)
    if pace_seconds(donor, low, begin) >= seconds:
        return high
    return begin
