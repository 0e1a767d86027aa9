"""Exports: servers above their cap give chunks to servers below it, until none is above.

The receiver with the most room comes first and takes, from all servers above the cap, the chunk
with the most useful work per byte (weighted by link), as large as its room allows. So chunks are
few and large, about one per receiver, and the receivers with the least room, which would take the
most bytes per unit of work, are left alone as long as the tolerance allows. When no receiver can
take anything any more, chunks may be shorter, or the cap rises a little for all.
"""

from __future__ import annotations

import math

from control_plane.planner.board import (
    BEGIN,
    CHUNKS,
    END,
    SEGMENT,
    Board,
    Segments,
    add_chunk,
    add_free,
    affordable,
    remove_free,
    resident_end,
)
from control_plane.planner.candidates import (
    ATTEMPTS,
    Candidate,
    Market,
    Variant,
    factor,
    find_best,
    open_market,
)
from control_plane.planner.chunk import CutRules, with_shorter_chunks
from control_plane.planner.compiled import compiled_inner, compiled_leaf
from control_plane.planner.costs import Pace, pace_seconds
from control_plane.planner.fit import Offer, fit_best
from control_plane.planner.fleet import Fleet
from control_plane.planner.headroom import Headroom, no_headroom, pop_headroom, push_headroom
from control_plane.planner.links import Links, link_cost
from control_plane.planner.senders import N_SENDERS, gather_senders, has_given
from control_plane.planner.target_load import Work
from core_attention.arrays import Float64Array

SLACK = 1e-3
"""A sender this close to the cap, as a share of it, is left alone."""
CAP_STEP = 2e-3
"""The share of the mean load by which the cap rises when room has run out."""
PATIENCE = 8e-3
"""The share of it by which the cap rises before chunks of which kernels are slow are cut
instead."""
MOST_FAILURES = 8
"""Receivers in a row that can take nothing, the ones with the most room, before the cap rises."""
MOST_CHUNKS = 4
"""Chunks for each server after which the search is given up where documents can be split instead:
plans have one or two, and each takes a search."""
SHRINKS = 5
"""How often a chunk that breaks a memory or byte limit is halved before it is given up."""


@compiled_leaf
def may_shorten(rules: CutRules, raised: float, first_cap: float) -> bool:
    """Return whether shorter pieces are tried next where nothing fits, not a higher cap.

    Args:
        raised: seconds by which the cap has risen from ``first_cap``.
    """
    return rules.min_tokens > rules.min_rest_tokens or (
        raised >= PATIENCE * first_cap and rules.min_tokens > rules.shortest_tokens
    )


@compiled_leaf
def most_chunks_of(n_servers: int) -> int:
    """After how many chunks a search is given up where documents can be split instead."""
    return MOST_CHUNKS * n_servers + 64


@compiled_inner
def export_surplus(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    links: Links,
    cap: Float64Array,
    work: Work,
    variant: Variant,
    every: int,
    give_up: float,
) -> float:
    """Moves work until no server is above its cap.

    Args:
        cap: ``[n_servers]`` seconds of attention; raised in place where it must be.
        work: who receives, and the typical rates.
        every: only one sender and one receiver in so many take part: a sample, which never raises
            the cap. 1 for all.
        give_up: share of the cap by which it may rise.

    Returns:
        By how many seconds the cap was raised; infinity if work is left that nobody can take.
    """
    market = open_market(board, segments, fleet, links, cap, work, variant)
    most_raised = min(4.0 * board.load.max(), give_up * cap.max())
    most_chunks = len(board.chunks)
    if math.isfinite(give_up):
        most_chunks = min(most_chunks, board.used[CHUNKS] + most_chunks_of(len(cap)))
    return _move_surplus(
        market, rules, no_headroom(len(cap)), cap.max(), most_raised, most_chunks, every
    )


@compiled_leaf
def _move_surplus(
    market: Market,
    rules: CutRules,
    headroom: Headroom,
    first_cap: float,
    most_raised: float,
    most_chunks: int,
    every: int,
) -> float:
    """The same, with all arrays that it needs.

    Args:
        first_cap: the largest cap.
        most_raised: by how many seconds it may rise.
        most_chunks: of the board's entries.
    """
    board, cap, senders = market.board, market.cap, market.senders
    slack, step = SLACK * first_cap, CAP_STEP * first_cap
    raised = 0.0
    failures = 0
    _look_around(market, rules, headroom, slack, every)
    while senders.counts[N_SENDERS] > 0:
        if every > 1 and headroom.size[0] == 0:
            return 0.0
        if board.used[CHUNKS] >= most_chunks or raised > most_raised:
            return math.inf
        if headroom.size[0] == 0 or failures == MOST_FAILURES:
            if may_shorten(rules, raised, first_cap):
                rules = with_shorter_chunks(rules)
            else:
                rise = max(step, 0.25 * raised)
                raised += rise
                for server in range(len(cap)):
                    cap[server] += rise
            failures = 0
            _look_around(market, rules, headroom, slack, every)
            continue
        receiver = pop_headroom(headroom)
        sender = _serve(market, rules, receiver)
        failures = 0 if sender >= 0 else failures + 1
        if sender < 0:
            continue
        over = board.load[sender] - cap[sender]
        has_given(senders, rules, sender, over / market.pair_rate[sender] if over > slack else 0.0)
        for server in (receiver, sender):
            _offer_room(market, headroom, slack, server)
    return raised


@compiled_leaf
def _look_around(
    market: Market, rules: CutRules, headroom: Headroom, slack: float, every: int
) -> None:
    """Finds the senders, and puts the servers that can take more than ``slack`` seconds on the
    heap; of both only one in ``every``."""
    load, cap = market.board.load, market.cap
    gather_senders(
        market.senders,
        market.fleet,
        market.links,
        rules,
        load,
        cap,
        slack,
        market.pair_rate,
        market.variant.urgency,
        every,
    )
    headroom.size[0] = 0
    for server in range(0, len(cap), every):
        _offer_room(market, headroom, slack, server)


@compiled_leaf
def _offer_room(market: Market, headroom: Headroom, slack: float, server: int) -> None:
    """Puts a server on the heap if it can take more than ``slack`` seconds."""
    room = market.cap[server] - market.board.load[server]
    if market.receives[server] and room > slack:
        push_headroom(headroom, server, room * factor(market.variant, server, len(market.cap)))


@compiled_leaf
def _serve(market: Market, rules: CutRules, receiver: int) -> int:
    """Gives ``receiver`` the best chunk of all; returns its sender, -1 if there is none that the
    receiver can take."""
    load, cap = market.board.load, market.cap
    room = cap[receiver] - load[receiver]
    for attempt in range(ATTEMPTS):
        best = find_best(market, rules, receiver, room / market.pair_rate[receiver], attempt)
        if best.part < 0:
            return -1
        surplus = load[best.sender] - cap[best.sender]
        if _take(market, rules, best, receiver, surplus, room):
            return best.sender
        market.failed[attempt] = best.part
    return -1


@compiled_leaf
def _take(
    market: Market,
    rules: CutRules,
    best: Candidate,
    receiver: int,
    surplus: float,
    room: float,
) -> bool:
    """Cuts the best chunk out of its free part, by true seconds; False if no chunk there keeps all
    limits and relieves the sender."""
    board, segments, fleet = market.board, market.segments, market.fleet
    part, sender, at_end = best.part, best.sender, best.at_end
    segment = board.free[part, SEGMENT]
    low, high = board.free[part, BEGIN], board.free[part, END]
    rank = fleet.rank[sender]
    resident = resident_end(board, fleet, segments.document[segment], receiver)
    whole = segments.whole[segment] and high - low == segments.end[segment]
    shortest = min(rules.min_tokens, high - low) if whole else rules.min_tokens
    # Made here, because a function that returned them would count references that nobody gives up.
    gives = Pace(fleet.tables, fleet.profile[sender], rules.phase, fleet.speed[sender])
    takes = Pace(fleet.tables, fleet.profile[receiver], rules.phase, fleet.speed[receiver])
    seconds = pace_seconds(gives, low, high)
    for _ in range(SHRINKS):
        offer = Offer(low, high, seconds, shortest, surplus, room, resident)
        begin, end = fit_best(rules, gives, takes, offer, at_end, market.variant.n_shifts)
        if end <= begin:
            return False
        before, after = pace_seconds(gives, low, begin), pace_seconds(gives, end, high)
        if before + after >= seconds:
            # What is left would run so slowly that the sender has no less to do.
            return False
        if affordable(board, fleet, begin, end, receiver, resident):
            remove_free(board, rank, part)
            board.load[sender] += before + after - seconds
            if begin > low:
                add_free(board, rank, segment, low, begin)
            if end < high:
                add_free(board, rank, segment, end, high)
            link = link_cost(market.links, rank, receiver)
            add_chunk(board, segments, fleet, rules, segment, begin, end, receiver, link)
            return True
        room *= 0.5
        at_end = max(low + 0.7 * (at_end - low), float(low + rules.min_tokens))
    return False
