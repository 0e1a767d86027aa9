"""The level: the time at which all servers would finish if work could be divided at will."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from control_plane.planner.board import Segments
from control_plane.planner.chunk import CutRules, begin_for_pairs
from control_plane.planner.compiled import BoolArray, compiled_inner
from control_plane.planner.costs import pair_seconds
from control_plane.planner.fleet import Fleet
from control_plane.planner.sorting import sorted_by
from core_attention.arrays import Float64Array, Int64Array

BISECTIONS = 50
LARGEST_GROWTH = 1.3
"""Bounds of the estimate; it is corrected by planning again where it is far off."""


class Work(NamedTuple):
    """What there is to do in a phase of a nano-batch, before anything moves.

    Attributes:
        receives: ``[n_servers]`` who may take work.
        pair_rate: ``[n_servers]`` typical seconds per query-key pair, speed included; infinite at
            speed 0.
        load: ``[n_servers]`` seconds of each server's own rank.
        longest: ``[n_servers]`` where its longest document ends.
        is_homeless: ``[n_segments]`` whether no server runs on the segment's rank.
        homeless: these segments, most query-key pairs first.
        pairs: all work, in query-key pairs at typical rates.
        level: seconds in which all servers would finish if work could be divided at will and
            pieces ran at the rates of whole documents.
    """

    receives: BoolArray
    pair_rate: Float64Array
    load: Float64Array
    longest: Float64Array
    is_homeless: BoolArray
    homeless: Int64Array
    pairs: float
    level: float


@compiled_inner
def weigh(segments: Segments, home_seconds: Float64Array, fleet: Fleet, phase: int) -> Work:
    """The work of ``segments``, which take ``home_seconds`` at home; those without a server that
    runs there, on the profile of that server or of the first one, at speed 1."""
    n, n_servers = len(segments.begin), len(fleet.rank)
    rate_of_profile = typical_pair_seconds(segments, fleet, phase)
    pair_rate = np.full(n_servers, np.inf)
    for s in range(n_servers):
        if fleet.speed[s] > 0.0:
            pair_rate[s] = rate_of_profile[fleet.profile[s]] / fleet.speed[s]
    load, longest = np.zeros(n_servers), np.zeros(n_servers)
    is_homeless = np.zeros(n, dtype=np.bool_)
    homeless_pairs = 0.0
    for i in range(n):
        server = fleet.server_of_rank[segments.rank[i]]
        if server >= 0 and fleet.speed[server] > 0.0:
            load[server] += home_seconds[i]
            longest[server] = max(longest[server], segments.end[i])
        else:
            is_homeless[i] = True
            homeless_pairs += home_seconds[i] / rate_of_profile[fleet.profile[max(server, 0)]]
    pairs = homeless_pairs
    for s in range(n_servers):
        if load[s] > 0.0:
            pairs += load[s] / pair_rate[s]
    receives = fleet.receives & (fleet.speed > 0.0)
    level = find_level(load, pairs, homeless_pairs, pair_rate, receives)
    homeless = _by_pairs(segments, is_homeless)
    return Work(receives, pair_rate, load, longest, is_homeless, homeless, pairs, level)


@compiled_inner
def _by_pairs(segments: Segments, chosen: BoolArray) -> Int64Array:
    """The chosen segments, most query-key pairs first."""
    picked = np.flatnonzero(chosen)
    # The length of a whole document with as many pairs, negated.
    key = np.zeros(len(chosen) if len(picked) else 0, dtype=np.int64)
    for i in picked:
        begin, end = float(segments.begin[i]), float(segments.end[i])
        key[i] = (1 << 32) - int(math.sqrt(end * end - begin * begin))
    return sorted_by(picked, key)


@compiled_inner
def typical_pair_seconds(segments: Segments, fleet: Fleet, phase: int) -> Float64Array:
    """``[n_profiles]`` seconds per query-key pair of work like this step's, at speed 1.

    Taken where a typical pair lies: the mean document end, weighted by pairs, and a quarter of it
    as q length.
    """
    pairs = moment = 0.0
    for i in range(len(segments.begin)):
        begin, end = float(segments.begin[i]), float(segments.end[i])
        held = 0.5 * (end * end - begin * begin)
        pairs += held
        moment += held * end
    kv = max(moment / pairs, 1.0)
    rate = np.empty(len(fleet.tables.layout))
    for p in range(len(rate)):
        rate[p] = pair_seconds(fleet.tables, p, phase, max(0.25 * kv, 1.0), kv)
    return rate


@compiled_inner
def find_level(
    load: Float64Array,
    pairs: float,
    homeless_pairs: float,
    pair_rate: Float64Array,
    receives: BoolArray,
) -> float:
    """The least seconds in which all work can be done.

    Args:
        load: ``[n_servers]`` seconds of each server's own rank.
        pairs: all work, in query-key pairs at typical rates.
        homeless_pairs: that of ranks without a server.
        pair_rate: ``[n_servers]`` seconds per pair.
        receives: ``[n_servers]``; the others do their own rank's work or less.

    Returns:
        The level in seconds; infinity if nobody can take the homeless work.
    """
    low, high = 0.0, load.max() if len(load) else 0.0
    if receives.any():
        high = max(high, pairs * pair_rate[receives].min())
    elif homeless_pairs > 0.0:
        return np.inf
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        capacity = 0.0
        for s in range(len(load)):
            if receives[s]:
                capacity += middle / pair_rate[s]
            elif load[s] > 0.0:
                capacity += min(load[s], middle) / pair_rate[s]
        if capacity < pairs:
            low = middle
        else:
            high = middle
    return high


@compiled_inner
def expected_growth(work: Work, fleet: Fleet, rules: CutRules) -> float:
    """By which factor all work grows (or shrinks) when what lies above the level runs in chunks of
    the cheapest shape, each as large as the level, cut out of each server's longest document."""
    grown = work.pairs
    for s in range(len(work.load)):
        if work.load[s] <= work.level:
            continue
        profile, longest = fleet.profile[s], work.longest[s]
        own_rate = pair_seconds(fleet.tables, profile, rules.phase, longest, longest)
        chunk_pairs = work.level * fleet.speed[s] / own_rate
        end = math.sqrt(2.0 * chunk_pairs / (1.0 - rules.kappa * rules.kappa))
        end = min(end, longest)
        q = max(end - begin_for_pairs(end, chunk_pairs), float(rules.min_tokens))
        chunk_rate = pair_seconds(fleet.tables, profile, rules.phase, q, end)
        moved = (work.load[s] - work.level) / work.pair_rate[s]
        grown += moved * (chunk_rate / own_rate - 1.0)
    return min(max(grown / work.pairs, 1.0 / LARGEST_GROWTH), LARGEST_GROWTH)
