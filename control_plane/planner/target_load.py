"""The target load: the time at which all servers would finish if work could be divided at will."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from control_plane.planner.board import Segments
from control_plane.planner.chunk import CutRules, begin_for_pairs
from control_plane.planner.compiled import BoolArray, compiled_inner, compiled_leaf
from control_plane.planner.costs import pair_seconds
from control_plane.planner.fleet import Fleet
from control_plane.planner.sorting import sorted_by
from control_plane.planner.survey import HomeWork
from core_attention.arrays import Float64Array, Int64Array

BISECTIONS = 50
CONVERGED = 1e-12
"""Relative excess at which a target load counts as found."""
LARGEST_GROWTH = 1.3
"""Bounds of the estimate; it is corrected by planning again where it is far off."""


class Work(NamedTuple):
    """The work of a phase of a nano-batch, before anything moves.

    Attributes:
        receives: ``[n_servers]`` who may take work.
        pair_rate: ``[n_servers]`` typical seconds per query-key pair, speed included; infinite at
            speed 0.
        base: ``[n_servers]`` seconds that each server computes beside attention.
        load: ``[n_servers]`` seconds of each server's own rank, without them.
        longest: ``[n_servers]`` where its longest document ends.
        is_homeless: ``[n_ranks]`` whether no server runs on a rank.
        homeless: the segments of these ranks, in the order in which they are placed.
        pairs: all work, in query-key pairs at typical rates.
        homeless_pairs: that of ranks without a server.
        target_load: seconds, base loads included, in which all servers would finish if work could
            be divided at will and pieces ran at the rates of whole documents.
    """

    receives: BoolArray
    pair_rate: Float64Array
    base: Float64Array
    load: Float64Array
    longest: Float64Array
    is_homeless: BoolArray
    homeless: Int64Array
    pairs: float
    homeless_pairs: float
    target_load: float


@compiled_inner
def weigh(segments: Segments, home: HomeWork, fleet: Fleet, phase: int) -> Work:
    """The work of ``segments``, which take ``home`` where they are at home."""
    n_servers = len(fleet.rank)
    rate_of_profile = typical_pair_seconds(home.mean_end, fleet, phase)
    pair_rate = np.full(n_servers, np.inf)
    for s in range(n_servers):
        if fleet.speed[s] > 0.0:
            pair_rate[s] = rate_of_profile[fleet.profile[s]] / fleet.speed[s]
    load, longest = np.zeros(n_servers), np.zeros(n_servers)
    is_homeless = np.zeros(len(fleet.server_of_rank), dtype=np.bool_)
    pairs = homeless_pairs = 0.0
    for rank in range(len(fleet.server_of_rank)):
        server = fleet.server_of_rank[rank]
        if server >= 0 and fleet.speed[server] > 0.0:
            load[server], longest[server] = home.rank_seconds[rank], home.longest[rank]
            pairs += load[server] / pair_rate[server]
        else:
            is_homeless[rank] = True
            rate = rate_of_profile[fleet.profile[max(server, 0)]]
            homeless_pairs += home.rank_seconds[rank] / rate
    pairs += homeless_pairs
    receives = fleet.receives & (fleet.speed > 0.0)
    base = fleet.base[phase]
    target_load = find_target_load(base, load, pairs, homeless_pairs, pair_rate, receives)
    homeless = _by_end(segments, is_homeless)
    return Work(
        receives,
        pair_rate,
        base,
        load,
        longest,
        is_homeless,
        homeless,
        pairs,
        homeless_pairs,
        target_load,
    )


@compiled_inner
def target_load_of_growth(work: Work, fleet: Fleet, growth: float) -> float:
    """The target load if all work took ``growth`` times as long."""
    if not fleet.is_based:
        return work.target_load * growth
    return find_target_load(
        work.base,
        work.load * growth,
        work.pairs * growth,
        work.homeless_pairs * growth,
        work.pair_rate,
        work.receives,
    )


@compiled_inner
def _by_end(segments: Segments, is_homeless: BoolArray) -> Int64Array:
    """The homeless segments, the one that ends latest in its document first.

    A whole document ends where it is long. The few queries that a document which spans ranks has
    on its last one take long and can hardly be cut: they go while rooms are wide, and what begins
    the document, which can be cut anywhere, fills what they leave.
    """
    if not is_homeless.any():
        return np.empty(0, dtype=np.int64)
    n = len(segments.begin)
    homeless, key = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    n_homeless = 0
    for i in range(n):
        if is_homeless[segments.rank[i]]:
            homeless[n_homeless] = i
            n_homeless += 1
            key[i] = (1 << 32) - segments.end[i]
    return sorted_by(homeless[:n_homeless], key)


@compiled_inner
def typical_pair_seconds(mean_end: float, fleet: Fleet, phase: int) -> Float64Array:
    """``[n_profiles]`` seconds per query-key pair of work like this step's, at speed 1.

    Taken where a typical pair lies: with ``mean_end`` keys, and a quarter of it as q length.
    """
    kv = max(mean_end, 1.0)
    rate = np.empty(len(fleet.tables.layout))
    for p in range(len(rate)):
        rate[p] = pair_seconds(fleet.tables, p, phase, max(0.25 * kv, 1.0), kv)
    return rate


@compiled_inner
def find_target_load(
    base: Float64Array,
    load: Float64Array,
    pairs: float,
    homeless_pairs: float,
    pair_rate: Float64Array,
    receives: BoolArray,
) -> float:
    """The least seconds in which all work can be done.

    Args:
        base: ``[n_servers]`` seconds that each server computes beside it.
        load: ``[n_servers]`` seconds of each server's own rank.
        pairs: all work, in query-key pairs at typical rates.
        homeless_pairs: that of ranks without a server.
        pair_rate: ``[n_servers]`` seconds per pair.
        receives: ``[n_servers]``; the others do their own rank's work or less.

    Returns:
        The target load in seconds, base included and never below the largest base, which the slot
        takes whatever is planned; infinity if nobody can take the homeless work.
    """
    per_second = np.zeros(len(base))
    pairs_per_second, n_others = _fill_per_second(pair_rate, receives, load, per_second)
    most_base = _largest(base)
    if pairs_per_second > 0.0 and n_others == 0 and most_base == 0.0:
        return pairs / pairs_per_second
    low, high = 0.0, _largest(load)
    if pairs_per_second > 0.0:
        high = max(high, pairs / pairs_per_second)
    elif homeless_pairs > 0.0:
        return np.inf
    high += most_base
    if n_others == 0:
        return max(_target_load_of_takers(base, pairs, pair_rate, per_second, high), most_base)
    others = np.flatnonzero(~receives & (load > 0.0))
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        capacity = middle * pairs_per_second
        if most_base > 0.0:
            capacity = 0.0
            for taker in range(len(base)):
                if receives[taker]:
                    capacity += max(middle - base[taker], 0.0) / pair_rate[taker]
        for s in others:
            capacity += min(load[s], max(middle - base[s], 0.0)) / pair_rate[s]
        if capacity < pairs:
            low = middle
        else:
            high = middle
    return max(high, most_base)


@compiled_leaf
def _fill_per_second(
    pair_rate: Float64Array, receives: BoolArray, load: Float64Array, per_second: Float64Array
) -> tuple[float, int]:
    """Writes the pairs per second of those who receive, and leaves the others' at 0; returns their
    sum, and how many others have work."""
    total, n_others = 0.0, 0
    for s in range(len(receives)):
        if receives[s]:
            per_second[s] = 1.0 / pair_rate[s]
            total += per_second[s]
        elif load[s] > 0.0:
            n_others += 1
    return total, n_others


@compiled_leaf
def _largest(values: Float64Array) -> float:
    """The largest of numbers that are 0 or more; 0 if there are none."""
    largest = 0.0
    for value in values:
        largest = max(largest, value)
    return largest


@compiled_leaf
def _smallest(values: Float64Array) -> float:
    """The smallest of numbers; infinite if there are none."""
    smallest = math.inf
    for value in values:
        smallest = min(smallest, value)
    return smallest


@compiled_leaf
def _target_load_of_takers(
    base: Float64Array,
    pairs: float,
    pair_rate: Float64Array,
    per_second: Float64Array,
    high: float,
) -> float:
    """When those who receive have done ``pairs``, at most ``high``. What they can do until a time
    is convex in it, so Newton's steps come down to the target load and never fall below.

    Args:
        per_second: of ``_fill_per_second``.
    """
    target_load = high
    for _ in range(BISECTIONS):
        capacity = pairs_per_second = 0.0
        for s in range(len(base)):
            if target_load > base[s] and per_second[s] > 0.0:
                capacity += (target_load - base[s]) / pair_rate[s]
                pairs_per_second += per_second[s]
        if capacity <= pairs * (1.0 + CONVERGED):
            break
        target_load -= (capacity - pairs) / pairs_per_second
    return target_load


@compiled_leaf
def expected_growth(work: Work, fleet: Fleet, rules: CutRules) -> float:
    """The factor by which all work grows (or shrinks) when what lies above the target load runs in
    chunks of the cheapest shape, each as large as the target load, cut out of each server's longest
    document."""
    grown = work.pairs
    room = work.target_load - _smallest(work.base)
    for s in range(len(work.load)):
        own_room = work.target_load - work.base[s]
        if work.load[s] <= own_room:
            continue
        profile, longest = fleet.profile[s], work.longest[s]
        own_rate = pair_seconds(fleet.tables, profile, rules.phase, longest, longest)
        chunk_pairs = room * fleet.speed[s] / own_rate
        end = math.sqrt(2.0 * chunk_pairs / (1.0 - rules.kappa * rules.kappa))
        end = min(end, longest)
        q = max(end - begin_for_pairs(end, chunk_pairs), float(rules.min_tokens))
        chunk_rate = pair_seconds(fleet.tables, profile, rules.phase, q, end)
        moved = (work.load[s] - own_room) / work.pair_rate[s]
        grown += moved * (chunk_rate / own_rate - 1.0)
    return min(max(grown / work.pairs, 1.0 / LARGEST_GROWTH), LARGEST_GROWTH)
