"""Exports: servers above their cap give chunks to servers below it, until none is above.

The receiver with the most room comes first and takes, from all servers above the cap, the chunk
with the most useful work per byte (weighted by link), as large as its room allows. So chunks are
few and large, about one per receiver, and the receivers with the least room, which would take the
most bytes per unit of work, are left alone as long as the tolerance allows. When no receiver can
take anything any more, chunks may be shorter, or the cap rises a little for all.
"""

from __future__ import annotations

import numpy as np

from control_plane.planner.board import (
    BEGIN,
    CHUNKS,
    END,
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
from control_plane.planner.candidates import Candidate, Variant, factor, find_best
from control_plane.planner.chunk import CutRules, with_shorter_chunks
from control_plane.planner.compiled import BoolArray, compiled_inner, compiled_leaf
from control_plane.planner.costs import pace_seconds
from control_plane.planner.donors import N_DONORS, Donors, gather_donors, has_given, no_donors
from control_plane.planner.fit import Offer, fit_best
from control_plane.planner.fleet import Fleet, pace_of
from control_plane.planner.level import Work
from control_plane.planner.links import Links, link_cost
from control_plane.planner.rooms import Rooms, no_rooms, pop_room, push_room
from core_attention.arrays import Float64Array

SLACK = 1e-3
"""A donor this close to the cap, as a share of it, is left alone."""
CAP_STEP = 2e-3
"""By how much of the mean load the cap rises when room has run out."""
PATIENCE = 8e-3
"""By how much of it the cap rises before chunks of which kernels are slow are cut instead."""
MOST_FAILURES = 8
"""Receivers in a row that can take nothing, the ones with the most room, before the cap rises."""
ATTEMPTS = 6
"""Parts that a receiver tries: the estimate that ranks them does not see every rule of cuts."""
SHRINKS = 5
"""How often a chunk that breaks a memory or byte limit is halved before it is given up."""


@compiled_inner
def export_surplus(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    limits: Limits,
    links: Links,
    cap: Float64Array,
    work: Work,
    variant: Variant,
    every: int,
) -> float:
    """Moves work until no server is above its cap.

    Args:
        cap: ``[n_servers]`` seconds; raised in place where it must be.
        work: who receives, and the typical rates.
        every: only one donor and one receiver in so many take part: a sample, which never raises
            the cap. 1 for all.

    Returns:
        By how many seconds the cap was raised; infinity if work is left that nobody can take.
    """
    load, receives, pair_rate = board.load, work.receives, work.pair_rate
    first_cap = cap.max()
    slack, step = SLACK * first_cap, CAP_STEP * first_cap
    raised, most_raised = 0.0, 4.0 * load.max()
    failures = 0
    donors = no_donors(links)
    gather_donors(donors, fleet, load, cap, slack, pair_rate, every)
    rooms = no_rooms(len(cap))
    _fill_rooms(rooms, load, cap, receives, slack, variant, every)
    while donors.counts[N_DONORS] > 0:
        if every > 1 and rooms.size[0] == 0:
            return 0.0
        if board.used[CHUNKS] >= len(board.chunks) or raised > most_raised:
            return np.inf
        if rooms.size[0] == 0 or failures == MOST_FAILURES:
            if rules.min_tokens > rules.min_rest_tokens or (
                raised >= PATIENCE * first_cap and rules.min_tokens > rules.shortest_tokens
            ):
                rules = with_shorter_chunks(rules)
            else:
                rise = max(step, 0.25 * raised)
                raised += rise
                cap[cap > 0.0] += rise
            failures = 0
            gather_donors(donors, fleet, load, cap, slack, pair_rate, every)
            _fill_rooms(rooms, load, cap, receives, slack, variant, every)
            continue
        receiver = pop_room(rooms)
        donor = _serve(
            board, segments, fleet, rules, limits, links, cap, pair_rate, variant, donors, receiver
        )
        failures = 0 if donor >= 0 else failures + 1
        if donor < 0:
            continue
        over = load[donor] - cap[donor]
        has_given(donors, donor, over / pair_rate[donor] if over > slack else 0.0)
        for server in (receiver, donor):
            room = cap[server] - load[server]
            if receives[server] and room > slack:
                push_room(rooms, server, room * factor(variant, server, len(cap)))
    return raised


@compiled_inner
def _fill_rooms(
    rooms: Rooms,
    load: Float64Array,
    cap: Float64Array,
    receives: BoolArray,
    slack: float,
    variant: Variant,
    every: int,
) -> None:
    """Puts the servers (one ``every`` so many) that can take more than ``slack`` seconds on the
    heap."""
    rooms.size[0] = 0
    for server in range(0, len(cap), every):
        room = cap[server] - load[server]
        if receives[server] and room > slack:
            push_room(rooms, server, room * factor(variant, server, len(cap)))


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
    donors: Donors,
    receiver: int,
) -> int:
    """Gives ``receiver`` the best chunk of all; returns its donor, -1 if there is none that the
    receiver can take."""
    failed = np.full(ATTEMPTS, -1, dtype=np.int64)
    room = cap[receiver] - board.load[receiver]
    for attempt in range(ATTEMPTS):
        best = find_best(
            board,
            segments,
            fleet,
            rules,
            links,
            donors,
            variant,
            receiver,
            room / pair_rate[receiver],
            failed[:attempt],
        )
        if best.part < 0:
            return -1
        surplus = board.load[best.donor] - cap[best.donor]
        if _take(
            board,
            segments,
            fleet,
            rules,
            limits,
            links,
            best,
            receiver,
            surplus,
            room,
            variant.n_shifts,
        ):
            return best.donor
        failed[attempt] = best.part
    return -1


@compiled_leaf
def _take(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    limits: Limits,
    links: Links,
    best: Candidate,
    receiver: int,
    surplus: float,
    room: float,
    n_shifts: int,
) -> bool:
    """Cuts the best chunk out of its free part, by true seconds; False if no chunk there keeps all
    limits."""
    part, donor, at_end = best.part, best.donor, best.at_end
    segment = board.free[part, SEGMENT]
    low, high = board.free[part, BEGIN], board.free[part, END]
    rank = fleet.rank[donor]
    resident = resident_end(board, fleet, segments.document[segment], receiver)
    whole = segments.whole[segment] and high - low == segments.end[segment]
    shortest = min(rules.min_tokens, high - low) if whole else rules.min_tokens
    gives, takes = pace_of(fleet, donor, rules.phase), pace_of(fleet, receiver, rules.phase)
    seconds = pace_seconds(gives, low, high)
    for _ in range(SHRINKS):
        offer = Offer(low, high, seconds, shortest, surplus, room, resident)
        begin, end = fit_best(rules, gives, takes, offer, at_end, n_shifts)
        if end <= begin:
            return False
        if affordable(segments, fleet, limits, segment, begin, end, receiver, resident):
            remove_free(board, rank, part)
            board.load[donor] -= seconds
            if begin > low:
                add_free(board, rank, segment, low, begin)
                board.load[donor] += pace_seconds(gives, low, begin)
            if end < high:
                add_free(board, rank, segment, end, high)
                board.load[donor] += pace_seconds(gives, end, high)
            link = link_cost(links, rank, receiver)
            add_chunk(board, segments, fleet, rules, limits, segment, begin, end, receiver, link)
            return True
        room *= 0.5
        at_end = max(low + 0.7 * (at_end - low), float(low + rules.min_tokens))
    return False
