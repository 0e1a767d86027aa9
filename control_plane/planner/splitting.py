"""Splitting: a server above its cap gives away ends of documents, each as large as a room.

The search for the best chunk (see ``exports``) leaves pieces of documents behind and rooms half
full. Where rooms are narrow next to what a few hundred queries of a giant document take, these
rests fit nowhere, and where thousands of short documents must move, a search for each takes long.
Splitting knows no value: the latest keys go first, into the widest room, cut from the end so that
it is filled; one rest stays at home. Nothing is lost but what alignment takes, so it finds the
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
from control_plane.planner.headroom import Headroom, no_headroom, pop_headroom, push_headroom
from control_plane.planner.links import Links, link_cost
from control_plane.planner.target_load import Work
from core_attention.arrays import Float64Array, Int64Array

SLACK = 1e-3
"""A server this close to the cap, as a share of it, is left alone."""
MOST_PASSED = 8
"""Receivers that one piece tries, those with the most room, before its document stays."""
UNCUT_SHARE = 1.0 / 64.0
"""Documents that take less than this share of the cap are not cut: a cut repeats keys, and the gap
that one leaves in a room is smaller."""
NEXT_SIZE = 0.9
"""After a document that fits no room the sender goes on with the first that is shorter by this."""


class Splitting(NamedTuple):
    """The state of splitting.

    Attributes:
        board, segments, fleet, links: what there is, and where.
        cap: ``[n_servers]`` seconds of attention that each server may reach.
        slack: seconds that do not count.
        short_seconds: documents that take less are not cut.
        receives, pair_rate: ``[n_servers]`` of ``target_load.Work``.
        home_seconds: ``[n_segments]`` what each takes at home.
        rooms: who can take something, by query-key pairs.
        senders: who is above the cap, by where the document ends that it gives next.
        next_part: ``[n_servers]`` of senders, that document's free part.
        over_before: ``[n_servers]`` of senders, seconds above the cap when it last began with its
            longest document.
        passed: ``[MOST_PASSED]`` receivers in whose rooms a piece did not fit.
        sums: ``[4]`` seconds that are left above caps, that senders are rid of, that receivers have
            got instead, and by which caps would have to rise before anything more fits.
        received: ``[n_servers]`` seconds of pieces of other homes that each has.
        waste: share by which a piece that fits into a room may run slower than one as long as the
            receiver's cap; where it is slower, the receiver gets the long one and gives away
            documents of its own. Infinite: nobody must.
    """

    board: Board
    segments: Segments
    fleet: Fleet
    links: Links
    cap: Float64Array
    slack: float
    short_seconds: float
    receives: BoolArray
    pair_rate: Float64Array
    home_seconds: Float64Array
    headroom: Headroom
    senders: Headroom
    next_part: Int64Array
    over_before: Float64Array
    passed: Int64Array
    sums: Float64Array
    received: Float64Array
    waste: float


LEFT, RELIEVED, ADDED, NEEDED = 0, 1, 2, 3
"""The columns of ``Splitting.sums``."""


class Gift(NamedTuple):
    """A free part of which a sender gives some.

    Attributes:
        part: of the board's free parts.
        low, high: its queries, ``[low, high)``.
        seconds: of all of it on the sender.
        surplus: seconds that the sender is above its cap.
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
def split_surplus(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    links: Links,
    cap: Float64Array,
    work: Work,
    home_seconds: Float64Array,
    waste: float,
) -> float:
    """Moves what is above ``cap`` as far as there is room.

    Args:
        waste: of :class:`Splitting`.

    Returns:
        By how many seconds the cap would have to rise, about, so that all fits: 0 if it does,
        infinity if the board ran out of entries.
    """
    n = len(cap)
    splitting = Splitting(
        board,
        segments,
        fleet,
        links,
        cap,
        SLACK * cap.max(),
        UNCUT_SHARE * cap.max(),
        work.receives,
        work.pair_rate,
        home_seconds,
        no_headroom(n),
        no_headroom(n),
        np.full(n, -1, dtype=np.int64),
        np.zeros(n),
        np.empty(MOST_PASSED, dtype=np.int64),
        np.array([0.0, 0.0, 0.0, math.inf]),
        np.maximum(board.load - work.load, 0.0),
        waste,
    )
    _split(splitting, with_shortest_chunks(rules) if math.isfinite(waste) else rules)
    left, relieved = splitting.sums[LEFT], splitting.sums[RELIEVED]
    growth = splitting.sums[ADDED] / relieved if relieved > 0.0 else 1.0
    rise: float = left * growth / max(work.receives.sum(), 1)
    if left > 0.0 and math.isfinite(splitting.sums[NEEDED]):
        rise = max(rise, splitting.sums[NEEDED])
    return rise


@compiled_leaf
def _split(splitting: Splitting, rules: CutRules) -> None:
    """Until nobody is above the cap, or nothing fits any more."""
    board, senders, cap = splitting.board, splitting.senders, splitting.cap
    free, load, slack = board.free, board.load, splitting.slack
    for server in range(len(cap)):
        _offer(splitting, server)
        rank = splitting.fleet.rank[server]
        if rank >= 0 and load[server] > cap[server] + slack and board.first_free[rank] >= 0:
            _begin_with_longest(splitting, server)
    while senders.size[0] > 0:
        if board.used[CHUNKS] >= len(board.chunks):
            splitting.sums[LEFT] = math.inf
            return
        sender = pop_headroom(senders)
        after = _give(splitting, rules, sender)
        over = load[sender] - cap[sender]
        if over > slack and after >= 0 and splitting.headroom.size[0] > 0:
            splitting.next_part[sender] = after
            push_headroom(senders, sender, float(free[after, END]))
        elif (
            over > slack and splitting.headroom.size[0] > 0 and _may_begin_again(splitting, sender)
        ):
            _begin_with_longest(splitting, sender)
        else:
            # Half of a short document may stay, see _give.
            splitting.sums[LEFT] += over if over > slack + 0.5 * splitting.short_seconds else 0.0
            _offer(splitting, sender)


@compiled_leaf
def _begin_with_longest(splitting: Splitting, sender: int) -> None:
    """Lets a sender give its longest document next."""
    board = splitting.board
    first = board.first_free[splitting.fleet.rank[sender]]
    splitting.next_part[sender] = first
    splitting.over_before[sender] = board.load[sender] - splitting.cap[sender]
    push_headroom(splitting.senders, sender, float(board.free[first, END]))


@compiled_leaf
def _may_begin_again(splitting: Splitting, sender: int) -> bool:
    """Return whether a sender has something left that it passed over, and gave anything since it
    last began with its longest document."""
    over = splitting.board.load[sender] - splitting.cap[sender]
    has_any = splitting.board.first_free[splitting.fleet.rank[sender]] >= 0
    return bool(has_any and over < splitting.over_before[sender] - splitting.slack)


@compiled_leaf
def _give(splitting: Splitting, rules: CutRules, sender: int) -> int:
    """Gives away what the sender gives next, or the end of it, if it fits into some room; returns
    the free part that comes after it, -1 if there is none."""
    board, fleet, segments = splitting.board, splitting.fleet, splitting.segments
    part = splitting.next_part[sender]
    segment, low, high = board.free[part, SEGMENT], board.free[part, BEGIN], board.free[part, END]
    gives = Pace(fleet.tables, fleet.profile[sender], rules.phase, fleet.speed[sender])
    whole = low == segments.begin[segment] and high == segments.end[segment]
    seconds = splitting.home_seconds[segment] if whole else pace_seconds(gives, low, high)
    is_short = whole and seconds < splitting.short_seconds
    surplus = board.load[sender] - splitting.cap[sender]
    gift = Gift(part, low, high, seconds, surplus, whole, is_short)
    after, n_free = board.free[part, NEXT], board.used[FREE]
    if not whole and high - low < rules.shortest_tokens:
        # What a cut has left says nothing about the documents after it.
        return int(after)
    # Of a short document more than half must be surplus.
    has_given = not (is_short and seconds > 2.0 * surplus) and (
        _give_end(splitting, rules, gives, gift)
        or (not is_short and _give_unfit(splitting, rules, gives, gift, sender))
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
def _give_end(splitting: Splitting, rules: CutRules, gives: Pace, gift: Gift) -> bool:
    """Gives the end of a part, or all of it, to one of the servers with the most room; False if it
    fits into none, or would run too slowly there."""
    board, headroom = splitting.board, splitting.headroom
    begin, n_passed = gift.high, 0
    while headroom.size[0] > 0:
        receiver = headroom.server[0]
        begin = _begin_for(splitting, rules, gives, receiver, gift)
        if begin < gift.high:
            if not gift.is_short and _is_wasteful(splitting, rules, gives, gift, receiver, begin):
                begin = gift.high
                break
            _move(splitting, rules, gives, receiver, gift, begin, gift.high)
            if (
                not gift.is_short
                or splitting.cap[receiver] - board.load[receiver] <= splitting.slack
            ):
                # Of short documents it takes more until one does not fit.
                pop_headroom(headroom)
                _offer(splitting, receiver)
            break
        if n_passed == MOST_PASSED:
            break
        splitting.passed[n_passed] = pop_headroom(headroom)
        n_passed += 1
    for k in range(n_passed):
        _offer(splitting, splitting.passed[k])
    return bool(begin < gift.high)


@compiled_leaf
def _give_unfit(
    splitting: Splitting, rules: CutRules, gives: Pace, gift: Gift, sender: int
) -> bool:
    """Gives some of a part whose end fits into no room; False if that is not possible."""
    # Who has itself got a piece gives what disturbs others least.
    has_received = splitting.received[sender] > 0.0
    for beginning in range(2):
        if splitting.headroom.size[0] == 0:
            return False
        if (beginning == 0) == has_received:
            if _give_beginning(splitting, rules, gives, gift):
                return True
        elif _give_long_end(splitting, rules, gives, gift):
            return True
    return False


@compiled_leaf
def _is_wasteful(
    splitting: Splitting, rules: CutRules, gives: Pace, gift: Gift, receiver: int, begin: int
) -> bool:
    """Return whether the piece from ``begin`` on, which fits into the room of ``receiver``, runs
    much slower than the one that it could take if it gave away its own documents."""
    fleet = splitting.fleet
    home = splitting.segments.rank[splitting.board.free[gift.part, SEGMENT]]
    if splitting.received[fleet.server_of_rank[home]] > 0.0:
        # It has got such a piece, for which it makes room.
        return False
    if begin == gift.low or not _may_make_room(splitting, receiver):
        return False
    takes = Pace(fleet.tables, fleet.profile[receiver], rules.phase, fleet.speed[receiver])
    most = splitting.cap[receiver] - splitting.received[receiver]
    long = _begin_of_piece(rules, gives, takes, gift, most)
    if long >= begin:
        # Nothing at all may fit there, which has no rate.
        return False
    slow = pace_seconds(takes, begin, gift.high) / causal_pairs(begin, gift.high)
    fast = pace_seconds(takes, long, gift.high) / causal_pairs(long, gift.high)
    return bool(slow > (1.0 + splitting.waste) * fast)


@compiled_leaf
def _may_make_room(splitting: Splitting, receiver: int) -> bool:
    """Return whether ``receiver`` has documents of its own that it may give away for a piece of
    another home."""
    rank = splitting.fleet.rank[receiver]
    is_asked = math.isfinite(splitting.waste) and rank >= 0
    return bool(is_asked and splitting.board.first_free[rank] >= 0)


@compiled_leaf
def _give_long_end(splitting: Splitting, rules: CutRules, gives: Pace, gift: Gift) -> bool:
    """Gives the end of a part to the server with the widest room, as much as fits there without
    the server's own documents, some of which must go then. False if it may not, or nothing fits;
    ``Splitting.sums`` gets to know what was missing."""
    board, fleet, receiver = splitting.board, splitting.fleet, splitting.headroom.server[0]
    takes = Pace(fleet.tables, fleet.profile[receiver], rules.phase, fleet.speed[receiver])
    most = splitting.cap[receiver] - board.load[receiver]
    begin = gift.high
    if _may_make_room(splitting, receiver):
        most = splitting.cap[receiver] - splitting.received[receiver]
        begin = _begin_of_piece(rules, gives, takes, gift, most)
    if begin == gift.high:
        shortest = max(gift.high - rules.shortest_tokens, gift.low)
        missing = pace_seconds(takes, shortest, gift.high) - most
        splitting.sums[NEEDED] = min(splitting.sums[NEEDED], max(missing, 0.0))
        return False
    pop_headroom(splitting.headroom)
    _move(splitting, rules, gives, receiver, gift, begin, gift.high)
    if board.load[receiver] > splitting.cap[receiver] + splitting.slack:
        _begin_with_longest(splitting, receiver)
    else:
        _offer(splitting, receiver)
    return True


@compiled_leaf
def _give_beginning(splitting: Splitting, rules: CutRules, gives: Pace, gift: Gift) -> bool:
    """Gives the beginning of a part to the server with the widest room, where the end fits into no
    room: queries with few keys take little, however few they are."""
    if math.isinf(splitting.waste):
        return False
    fleet, receiver = splitting.fleet, splitting.headroom.server[0]
    takes = Pace(fleet.tables, fleet.profile[receiver], rules.phase, fleet.speed[receiver])
    room = splitting.cap[receiver] - splitting.board.load[receiver]
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
    pop_headroom(splitting.headroom)
    _move(splitting, rules, gives, receiver, gift, gift.low, end)
    _offer(splitting, receiver)
    return True


@compiled_leaf
def _begin_for(
    splitting: Splitting, rules: CutRules, gives: Pace, receiver: int, gift: Gift
) -> int:
    """The begin of what ``receiver`` takes of a part; its end if it takes nothing."""
    board, fleet, segments = splitting.board, splitting.fleet, splitting.segments
    segment, low, high = board.free[gift.part, SEGMENT], gift.low, gift.high
    takes = Pace(fleet.tables, fleet.profile[receiver], rules.phase, fleet.speed[receiver])
    room = splitting.cap[receiver] - board.load[receiver]
    if gift.is_short:
        taken = gift.seconds * gives.speed / takes.speed
        if takes.profile != gives.profile:
            taken = pace_seconds(takes, low, high)
        begin = low if taken <= room else high
    else:
        begin = _begin_of_piece(rules, gives, takes, gift, room)
    if begin < high and fleet.is_limited:
        resident = resident_end(board, fleet, segments.document[segment], receiver)
        if not affordable(board, fleet, begin, high, receiver, resident):
            begin = high
    return begin


@compiled_leaf
def _move(
    splitting: Splitting,
    rules: CutRules,
    gives: Pace,
    receiver: int,
    gift: Gift,
    begin: int,
    end: int,
) -> None:
    """Gives ``[begin, end)`` of a part to ``receiver``."""
    board, fleet, segments = splitting.board, splitting.fleet, splitting.segments
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
    link = link_cost(splitting.links, rank, receiver)
    add_chunk(board, segments, fleet, rules, segment, begin, end, receiver, link)
    added = board.load[receiver] - before
    splitting.received[receiver] += added
    splitting.sums[RELIEVED] += gift.seconds - left
    splitting.sums[ADDED] += added


@compiled_leaf
def _offer(splitting: Splitting, server: int) -> None:
    """Puts a server on the heap if it can take more than the slack."""
    room = splitting.cap[server] - splitting.board.load[server]
    if splitting.receives[server] and room > splitting.slack:
        push_headroom(splitting.headroom, server, room / splitting.pair_rate[server])


@compiled_leaf
def _begin_of_piece(rules: CutRules, sender: Pace, receiver: Pace, gift: Gift, room: float) -> int:
    """The begin of the piece at the end of a part: it fills the room or takes the surplus,
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
        wanted = latest_end(sender, low, high, seconds - gift.surplus, rules.alignment)
        begin = max(earliest, min(wanted, high - shortest))
    if 0 < begin - low < rules.min_rest_tokens:
        # A short rest takes nearly as long as a longer one.
        begin = low if earliest == low else min(low + rules.min_rest_tokens, high - shortest)
    if pace_seconds(sender, low, begin) >= seconds:
        return high
    return begin
