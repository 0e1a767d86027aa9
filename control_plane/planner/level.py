"""The level: the time at which all servers would finish if work could be divided at will."""

from __future__ import annotations

import math

import numpy as np

from control_plane.planner.board import Segments
from control_plane.planner.chunk import CutRules, begin_for_pairs
from control_plane.planner.compiled import BoolArray, compiled_inner
from control_plane.planner.costs import pair_seconds
from control_plane.planner.fleet import Fleet
from core_attention.arrays import Float64Array

BISECTIONS = 60
LARGEST_GROWTH = 1.3
"""Bounds of the estimate; it is corrected by planning again where it is far off."""


@compiled_inner
def typical_pair_seconds(segments: Segments, fleet: Fleet, phase: int) -> Float64Array:
    """``[n_servers]`` seconds per query-key pair of work like this step's; infinite at speed 0.

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
    rate_of_profile = np.empty(len(fleet.tables.layout))
    for p in range(len(rate_of_profile)):
        rate_of_profile[p] = pair_seconds(fleet.tables, p, phase, max(0.25 * kv, 1.0), kv)
    rate = np.empty(len(fleet.rank))
    for s in range(len(rate)):
        speed = fleet.speed[s]
        rate[s] = rate_of_profile[fleet.profile[s]] / speed if speed > 0.0 else np.inf
    return rate


@compiled_inner
def find_level(
    load: Float64Array, homeless_pairs: float, pair_rate: Float64Array, receives: BoolArray
) -> float:
    """The least seconds in which all work can be done.

    Args:
        load: ``[n_servers]`` seconds of each server's own rank.
        homeless_pairs: query-key pairs of ranks without a server.
        pair_rate: ``[n_servers]`` seconds per pair.
        receives: ``[n_servers]``; the others do their own rank's work or less.

    Returns:
        The level in seconds; infinity if nobody can take the homeless work.
    """
    work = homeless_pairs
    for s in range(len(load)):
        if load[s] > 0.0:
            work += load[s] / pair_rate[s]
    low, high = 0.0, load.max() if len(load) else 0.0
    if receives.any():
        high = max(high, work * pair_rate[receives].min())
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
        if capacity < work:
            low = middle
        else:
            high = middle
    return high


@compiled_inner
def expected_growth(
    fleet: Fleet,
    rules: CutRules,
    load: Float64Array,
    longest: Float64Array,
    pair_rate: Float64Array,
    level: float,
    work: float,
) -> float:
    """By which factor all work grows (or shrinks) when what lies above ``level`` runs in chunks
    of the cheapest shape, each as large as ``level``, cut out of each server's longest document.

    Args:
        load: ``[n_servers]`` seconds of each server's own rank.
        longest: ``[n_servers]`` where its longest document ends.
        pair_rate: ``[n_servers]`` typical seconds per pair.
        work: all work, in pairs at typical rates.
    """
    grown = work
    for s in range(len(load)):
        if load[s] <= level:
            continue
        profile = fleet.profile[s]
        own_rate = pair_seconds(fleet.tables, profile, rules.phase, longest[s], longest[s])
        chunk_pairs = level * fleet.speed[s] / own_rate
        end = math.sqrt(2.0 * chunk_pairs / (1.0 - rules.kappa * rules.kappa))
        end = min(end, longest[s])
        q = max(end - begin_for_pairs(end, chunk_pairs), float(rules.min_tokens))
        chunk_rate = pair_seconds(fleet.tables, profile, rules.phase, q, end)
        grown += (load[s] - level) * (chunk_rate / own_rate - 1.0) / pair_rate[s]
    return min(max(grown / work, 1.0 / LARGEST_GROWTH), LARGEST_GROWTH)
