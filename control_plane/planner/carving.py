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
from control_plane.planner.chunk import CutRules, begin_for_seconds, with_shortest_chunks
from control_plane.planner.compiled import BoolArray, compiled_inner, compiled_leaf
from control_plane.planner.costs import Pace, causal_pairs, pace_seconds
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
        over_before: ``[n_servers]`` of donors, seconds above the cap when it last began with its
            longest document.
        passed: ``[MOST_PASSED]`` receivers in whose rooms a piece did not fit.
        sums: ``[4]`` seconds that are left above caps, that donors are rid of, that receivers have
            got instead, and by which caps would have to rise before anything more fits.
        received: ``[n_servers]`` seconds of pieces of other homes that each has.
        waste: share by which a piece that fits into a room may run slower than one as long as the
            receiver's cap; where it is slower, the receiver gets the long one and gives away
            documents of its own. Infinite: nobody must.
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
    over_before: Float64Array
    passed: Int64Array
    sums: Float64Array
    received: Float64Array
    waste: float


LEFT, RELIEVED, ADDED, NEEDED = 0, 1, 2, 3
"""Of ``Carving.sums``."""


class Gift(NamedTuple):
    """A free part of which a donor gives some.

    Attributes:
        part: of the board's free parts.
        low, high: its queries, ``[low, high)``.
        seconds: of all of it on the donor.
        surplus: seconds that the donor is above its cap.
        whole: it is a whole segment, which may move whatever its length.
        is_short: so short that it is not cut.
    """

    part: int
    low: int
    high: int
    seconds: float
    surplus: float
    whole: bool
    is_short: bool


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
    waste: float,
) -> float:
    """Moves what is above ``cap`` as far as there is room.

    Args:
        waste: of :class:`Carving`.

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
        np.zeros(n),
        np.empty(MOST_PASSED, dtype=np.int64),
        np.array([0.0, 0.0, 0.0, math.inf]),
        np.maximum(board.load - work.load, 0.0),
        waste,
    )
    _carve(carving, with_shortest_chunks(rules) if math.isfinite(waste) else rules)
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
            _begin_with_longest(carving, server)
    while donors.size[0] > 0:
        if board.used[CHUNKS] >= len(board.chunks):
            carving.sums[LEFT] = math.inf
            return
        donor = pop_room(donors)
        after = _give(carving, rules, donor)
        over = load[donor] - cap[donor]
        if over > slack and after >= 0 and carving.rooms.size[0] > 0:
            carving.next_part[donor] = after
            push_room(donors, donor, float(free[after, END]))
        elif over > slack and carving.rooms.size[0] > 0 and _may_begin_again(carving, donor):
            _begin_with_longest(carving, donor)
        else:
            # Half of a short document may stay, see _give.
            carving.sums[LEFT] += over if over > slack + 0.5 * carving.short_seconds else 0.0
            _offer(carving, donor)


@compiled_leaf
def _begin_with_longest(carving: Carving, donor: int) -> None:
    """Lets a donor give its longest document next."""
    board = carving.board
    first = board.first_free[carving.fleet.rank[donor]]
    carving.next_part[donor] = first
    carving.over_before[donor] = board.load[donor] - carving.cap[donor]
    push_room(carving.donors, donor, float(board.free[first, END]))


@compiled_leaf
def _may_begin_again(carving: Carving, donor: int) -> bool:
    """Whether a donor has something left that it passed over, and gave anything since it last
    began with its longest document."""
    over = carving.board.load[donor] - carving.cap[donor]
    has_any = carving.board.first_free[carving.fleet.rank[donor]] >= 0
    return bool(has_any and over < carving.over_before[donor] - carving.slack)


@compiled_leaf
def _give(carving: Carving, rules: CutRules, donor: int) -> int:
    """Gives away what the donor gives next, or the end of it, if it fits into some room; returns
    the free part that comes after it, -1 if there is none."""
    board, fleet, segments = carving.board, carving.fleet, carving.segments
    part = carving.next_part[donor]
    segment, low, high = board.free[part, SEGMENT], board.free[part, BEGIN], board.free[part, END]
    gives = Pace(fleet.tables, fleet.profile[donor], rules.phase, fleet.speed[donor])
    whole = low == segments.begin[segment] and high == segments.end[segment]
    seconds = carving.home_seconds[segment] if whole else pace_seconds(gives, low, high)
    is_short = whole and seconds < carving.short_seconds
    surplus = board.load[donor] - carving.cap[donor]
    gift = Gift(part, low, high, seconds, surplus, whole, is_short)
    after, n_free = board.free[part, NEXT], board.used[FREE]
    if not whole and high - low < rules.shortest_tokens:
        # What a cut has left says nothing about the documents after it.
        return int(after)
    # Of a short document more than half must be surplus.
    has_given = not (is_short and seconds > 2.0 * surplus) and (
        _give_end(carving, rules, gives, gift)
        or (not is_short and _give_unfit(carving, rules, gives, gift, donor))
    )
    if has_given:
        rest = board.used[FREE] - 1
        if rest >= n_free and (after < 0 or board.free[rest, END] >= board.free[after, END]):
            after = rest
    else:
        while after >= 0 and board.free[after, END] > NEXT_SIZE * high:
            after = board.free[after, NEXT]
    return int(after)


@compiled_leaf
def _give_end(carving: Carving, rules: CutRules, gives: Pace, gift: Gift) -> bool:
    """Gives the end of a part, or all of it, to one of the servers with the most room; False if it
    fits into none, or would run too slowly there."""
    board, rooms = carving.board, carving.rooms
    begin, n_passed = gift.high, 0
    while rooms.size[0] > 0:
        receiver = rooms.server[0]
        begin = _begin_for(carving, rules, gives, receiver, gift)
        if begin < gift.high:
            if not gift.is_short and _is_wasteful(carving, rules, gives, gift, receiver, begin):
                begin = gift.high
                break
            _move(carving, rules, gives, receiver, gift, begin, gift.high)
            if not gift.is_short or carving.cap[receiver] - board.load[receiver] <= carving.slack:
                # Of short documents it takes more until one does not fit.
                pop_room(rooms)
                _offer(carving, receiver)
            break
        if n_passed == MOST_PASSED:
            break
        carving.passed[n_passed] = pop_room(rooms)
        n_passed += 1
    for k in range(n_passed):
        _offer(carving, carving.passed[k])
    return bool(begin < gift.high)


@compiled_leaf
def _give_unfit(carving: Carving, rules: CutRules, gives: Pace, gift: Gift, donor: int) -> bool:
    """Gives some of a part whose end fits into no room; False if that is not possible."""
    # Who has itself got a piece gives what disturbs others least.
    has_received = carving.received[donor] > 0.0
    for beginning in range(2):
        if carving.rooms.size[0] == 0:
            return False
        if (beginning == 0) == has_received:
            if _give_beginning(carving, rules, gives, gift):
                return True
        elif _give_long_end(carving, rules, gives, gift):
            return True
    return False


@compiled_leaf
def _is_wasteful(
    carving: Carving, rules: CutRules, gives: Pace, gift: Gift, receiver: int, begin: int
) -> bool:
    """Whether the piece from ``begin`` on, which fits into the room of ``receiver``, runs much
    slower than the one that it could take if it gave away its own documents."""
    fleet = carving.fleet
    home = carving.segments.rank[carving.board.free[gift.part, SEGMENT]]
    if carving.received[fleet.server_of_rank[home]] > 0.0:
        # It has got such a piece, for which it makes room.
        return False
    if begin == gift.low or not _may_make_room(carving, receiver):
        return False
    takes = Pace(fleet.tables, fleet.profile[receiver], rules.phase, fleet.speed[receiver])
    most = carving.cap[receiver] - carving.received[receiver]
    long = _begin_of_piece(rules, gives, takes, gift, most)
    if long >= begin:
        # Nothing at all may fit there, which has no rate.
        return False
    slow = pace_seconds(takes, begin, gift.high) / causal_pairs(begin, gift.high)
    fast = pace_seconds(takes, long, gift.high) / causal_pairs(long, gift.high)
    return bool(slow > (1.0 + carving.waste) * fast)


@compiled_leaf
def _may_make_room(carving: Carving, receiver: int) -> bool:
    """Whether ``receiver`` has documents of its own that it may give away for a piece of another
    home."""
    rank = carving.fleet.rank[receiver]
    is_asked = math.isfinite(carving.waste) and rank >= 0
    return bool(is_asked and carving.board.first_free[rank] >= 0)


@compiled_leaf
def _give_long_end(carving: Carving, rules: CutRules, gives: Pace, gift: Gift) -> bool:
    """Gives the end of a part to the server with the widest room, as much as fits there without
    the server's own documents, some of which must go then. False if it may not, or nothing fits;
    ``Carving.sums`` gets to know what was missing."""
    board, fleet, receiver = carving.board, carving.fleet, carving.rooms.server[0]
    takes = Pace(fleet.tables, fleet.profile[receiver], rules.phase, fleet.speed[receiver])
    most = carving.cap[receiver] - board.load[receiver]
    begin = gift.high
    if _may_make_room(carving, receiver):
        most = carving.cap[receiver] - carving.received[receiver]
        begin = _begin_of_piece(rules, gives, takes, gift, most)
    if begin == gift.high:
        shortest = max(gift.high - rules.shortest_tokens, gift.low)
        missing = pace_seconds(takes, shortest, gift.high) - most
        carving.sums[NEEDED] = min(carving.sums[NEEDED], max(missing, 0.0))
        return False
    pop_room(carving.rooms)
    _move(carving, rules, gives, receiver, gift, begin, gift.high)
    if board.load[receiver] > carving.cap[receiver] + carving.slack:
        _begin_with_longest(carving, receiver)
    else:
        _offer(carving, receiver)
    return True


@compiled_leaf
def _give_beginning(carving: Carving, rules: CutRules, gives: Pace, gift: Gift) -> bool:
    """Gives the beginning of a part to the server with the widest room, where the end fits into no
    room: queries with few keys take little, however few they are."""
    if math.isinf(carving.waste):
        return False
    fleet, receiver = carving.fleet, carving.rooms.server[0]
    takes = Pace(fleet.tables, fleet.profile[receiver], rules.phase, fleet.speed[receiver])
    room = carving.cap[receiver] - carving.board.load[receiver]
    end = latest_end(takes, gift.low, gift.high, room, rules.alignment)
    if gift.seconds > gift.surplus:
        keep = gift.seconds - gift.surplus
        end = min(end, begin_for_seconds(gives, gift.low, gift.high, keep, rules.alignment))
    end = min(end, gift.high - rules.shortest_tokens)
    if end - gift.low < rules.shortest_tokens:
        return False
    relief = gift.seconds - pace_seconds(gives, end, gift.high)
    if relief < 0.5 * pace_seconds(gives, gift.low, end):
        return False
    pop_room(carving.rooms)
    _move(carving, rules, gives, receiver, gift, gift.low, end)
    _offer(carving, receiver)
    return True


@compiled_leaf
def _begin_for(carving: Carving, rules: CutRules, gives: Pace, receiver: int, gift: Gift) -> int:
    """Where what ``receiver`` takes of a part begins; its end if it takes nothing."""
    board, fleet, segments = carving.board, carving.fleet, carving.segments
    segment, low, high = board.free[gift.part, SEGMENT], gift.low, gift.high
    takes = Pace(fleet.tables, fleet.profile[receiver], rules.phase, fleet.speed[receiver])
    room = carving.cap[receiver] - board.load[receiver]
    if gift.is_short:
        taken = gift.seconds * gives.speed / takes.speed
        if takes.profile != gives.profile:
            taken = pace_seconds(takes, low, high)
        begin = low if taken <= room else high
    else:
        begin = _begin_of_piece(rules, gives, takes, gift, room)
    if begin < high and carving.limits.active:
        resident = resident_end(board, fleet, segments.document[segment], receiver)
        if not affordable(
            segments, fleet, carving.limits, segment, begin, high, receiver, resident
        ):
            begin = high
    return begin


@compiled_leaf
def _move(
    carving: Carving, rules: CutRules, gives: Pace, receiver: int, gift: Gift, begin: int, end: int
) -> None:
    """Gives ``[begin, end)`` of a part to ``receiver``."""
    board, fleet, segments = carving.board, carving.fleet, carving.segments
    segment = board.free[gift.part, SEGMENT]
    rank = segments.rank[segment]
    before = board.load[receiver]
    left = pace_seconds(gives, gift.low, begin) + pace_seconds(gives, end, gift.high)
    remove_free(board, rank, gift.part)
    board.load[fleet.server_of_rank[rank]] -= gift.seconds - left
    if begin > gift.low:
        add_free(board, rank, segment, gift.low, begin)
    if end < gift.high:
        add_free(board, rank, segment, end, gift.high)
    link = link_cost(carving.links, rank, receiver)
    add_chunk(board, segments, fleet, rules, carving.limits, segment, begin, end, receiver, link)
    added = board.load[receiver] - before
    carving.received[receiver] += added
    carving.sums[RELIEVED] += gift.seconds - left
    carving.sums[ADDED] += added


@compiled_leaf
def _offer(carving: Carving, server: int) -> None:
    """Puts a server on the heap if it can take more than the slack."""
    room = carving.cap[server] - carving.board.load[server]
    if carving.receives[server] and room > carving.slack:
        push_room(carving.rooms, server, room / carving.pair_rate[server])


@compiled_leaf
def _begin_of_piece(rules: CutRules, donor: Pace, receiver: Pace, gift: Gift, room: float) -> int:
    """Where the piece at the end of a part begins: it fills the room or takes the surplus,
    whichever is less; the part's end if none fits."""
    low, high, seconds = gift.low, gift.high, gift.seconds
    shortest = rules.shortest_tokens
    earliest = begin_for_seconds(receiver, low, high, room, rules.alignment)
    if high - low < 2 * shortest:
        fits = earliest == low and (gift.whole or high - low >= shortest)
        return low if fits else high
    if high - earliest < shortest:
        return high
    begin = earliest
    if seconds > gift.surplus:
        wanted = latest_end(donor, low, high, seconds - gift.surplus, rules.alignment)
        begin = max(earliest, min(wanted, high - shortest))
    if 0 < begin - low < rules.min_rest_tokens:
        # A short rest takes nearly as long as a longer one.
        begin = low if earliest == low else min(low + rules.min_rest_tokens, high - shortest)
    if pace_seconds(donor, low, begin) >= seconds:
        return high
    return begin
