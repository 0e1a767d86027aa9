"""Cost profiles as flat tables that compiled code reads: the same numbers as ``CostProfile``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from control_plane.planner.compiled import compiled, compiled_leaf
from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase, causal_qk_pairs
from core_attention.cost_model import CostProfile

FORWARD, BACKWARD = 0, 1
PHASE_INDEX = {Phase.FORWARD: FORWARD, Phase.BACKWARD: BACKWARD}


OCTAVES = 32
"""Token counts have 31 bits: the cell of a grid is looked up by the leading one."""

_PER_OCTAVE = 1.0 / math.log(2.0)


class CostTables(NamedTuple):
    """The profiles of all servers in two arrays: compiled code counts references to every array
    that it passes on, so a few arrays are faster than many.

    Attributes:
        values: of profile p, one after another: the logarithms of its q grid, those of its kv
            grid, and seconds per query-key pair ``[2, n_q, n_kv]`` (forward, then backward).
        layout: ``[n_profiles, _OCTAVE_KV + OCTAVES]`` where its values begin, n_q, n_kv, then the
            q cell of 2^k tokens for every k, and likewise the kv cell.
    """

    values: Float64Array
    layout: Int64Array


_BEGIN, _N_Q, _N_KV, _OCTAVE_Q = 0, 1, 2, 3
_OCTAVE_KV = _OCTAVE_Q + OCTAVES


UNCUT_TOKENS = 1 << 14
"""Rates of uncut documents shorter than this are looked up by length: almost all documents are."""


class _Flat(NamedTuple):
    """One profile's share of the tables, its values beginning at 0; and ``[UNCUT_TOKENS, 2]``
    seconds per query-key pair of uncut documents by length, forward and backward."""

    values: Float64Array
    layout: Int64Array
    uncut_rates: Float64Array


# A profile is immutable, so what is derived from it once holds as long as it lives.
_flat_of_profile: WeakKeyDictionary[CostProfile, _Flat] = WeakKeyDictionary()


def pack_profiles(profiles: Sequence[CostProfile]) -> tuple[CostTables, Float64Array, Int64Array]:
    """The tables of ``profiles``; ``[n_profiles, UNCUT_TOKENS, 2]`` their rates of uncut documents;
    and for each of ``profiles`` its index in the tables.

    Servers that share one profile object share its table.
    """
    if profiles.count(profiles[0]) == len(profiles):
        only = _flatten(profiles[0])
        index = np.zeros(len(profiles), dtype=np.int64)
        return CostTables(only.values, only.layout[None]), only.uncut_rates[None], index
    index_of = {profile: index for index, profile in enumerate(dict.fromkeys(profiles))}
    index = np.array([index_of[profile] for profile in profiles], dtype=np.int64)
    flat = [_flatten(profile) for profile in index_of]
    sizes = np.array([len(f.values) for f in flat], dtype=np.int64)
    layout = np.stack([f.layout for f in flat])
    layout[:, _BEGIN] = np.cumsum(sizes) - sizes
    uncut_rates = np.stack([f.uncut_rates for f in flat])
    return CostTables(np.concatenate([f.values for f in flat]), layout), uncut_rates, index


def _flatten(profile: CostProfile) -> _Flat:
    flat = _flat_of_profile.get(profile)
    if flat is None:
        q, kv = profile.q_tokens, profile.kv_tokens
        keys = np.maximum(kv[None, :], q[:, None])
        pairs = causal_qk_pairs(keys - q[:, None], keys)
        rates = [profile.forward_seconds / pairs, profile.backward_seconds / pairs]
        values = np.concatenate([np.log(q), np.log(kv), *(rate.ravel() for rate in rates)])
        layout = np.concatenate([[0, len(q), len(kv)], _octaves(q), _octaves(kv)])
        uncut_rates = np.empty((UNCUT_TOKENS, 2))
        _fill_uncut_rates(CostTables(values, layout[None]), uncut_rates)
        flat = _Flat(values, layout, uncut_rates)
        _flat_of_profile[profile] = flat
    return flat


def _octaves(grid: Int64Array) -> Int64Array:
    cell = np.searchsorted(grid, 2 ** np.arange(OCTAVES), side="right") - 1
    return np.minimum(cell, len(grid) - 2).astype(np.int64)


class Keys(NamedTuple):
    """The place of a number of keys in a profile's grid.

    Attributes:
        at: index in ``CostTables.values`` of the rate of the fewest queries and of the grid's last
            number of keys that is no larger.
        share: how far it is from there to the next one, in [0, 1].
    """

    at: int
    share: float


@compiled_leaf
def pair_seconds(tables: CostTables, profile: int, phase: int, q: float, kv: float) -> float:
    """Seconds per query-key pair of a task of ``q`` queries and ``kv`` keys."""
    log_q = math.log(max(q, 1.0))
    log_kv = log_q if kv == q else math.log(max(kv, 1.0))
    keys = _place_log_keys(tables, profile, phase, log_kv)
    i, a = _place_log_queries(tables, profile, log_q)
    return _bilinear(tables, profile, keys, i, a)


@compiled_leaf
def pair_seconds_of_both(
    tables: CostTables, profile: int, q: float, kv: float
) -> tuple[float, float]:
    """The same forward and backward."""
    log_q = math.log(max(q, 1.0))
    log_kv = log_q if kv == q else math.log(max(kv, 1.0))
    keys = _place_log_keys(tables, profile, FORWARD, log_kv)
    n_rates = tables.layout[profile, _N_Q] * tables.layout[profile, _N_KV]
    i, a = _place_log_queries(tables, profile, log_q)
    forward = _bilinear(tables, profile, keys, i, a)
    return forward, _bilinear(tables, profile, Keys(keys.at + n_rates, keys.share), i, a)


@compiled_leaf
def place_keys(tables: CostTables, profile: int, phase: int, kv: float) -> Keys:
    """The place of ``kv`` keys for :func:`pair_seconds_at`."""
    return _place_log_keys(tables, profile, phase, math.log(max(kv, 1.0)))


@compiled_leaf
def pair_seconds_at(tables: CostTables, profile: int, keys: Keys, q: float) -> float:
    """:func:`pair_seconds` for many numbers of queries and one of keys."""
    i, a = _place_log_queries(tables, profile, math.log(max(q, 1.0)))
    return _bilinear(tables, profile, keys, i, a)


@compiled_leaf
def _place_log_keys(tables: CostTables, profile: int, phase: int, log_kv: float) -> Keys:
    begin, n_q = tables.layout[profile, _BEGIN], tables.layout[profile, _N_Q]
    n_kv = tables.layout[profile, _N_KV]
    j, share = _place(tables, profile, _OCTAVE_KV, begin + n_q, n_kv, log_kv)
    return Keys(begin + n_q + n_kv + phase * (n_q * n_kv) + j, share)


@compiled_leaf
def _place_log_queries(tables: CostTables, profile: int, log_q: float) -> tuple[int, float]:
    begin, n_q = tables.layout[profile, _BEGIN], tables.layout[profile, _N_Q]
    return _place(tables, profile, _OCTAVE_Q, begin, n_q, log_q)


@compiled_leaf
def _place(
    tables: CostTables, profile: int, octaves: int, first: int, n: int, log_tokens: float
) -> tuple[int, float]:
    """The cell of a grid of ``n`` logarithms, ``values[first:first + n]``, in which one lies, and
    where in the cell. ``octaves``: column of ``layout`` with the grid's cells by octave."""
    # The leading bit gives the cell, or the first of the few cells, of that octave.
    i = tables.layout[profile, octaves + min(int(log_tokens * _PER_OCTAVE), OCTAVES - 1)]
    while i < n - 2 and tables.values[first + i + 1] <= log_tokens:
        i += 1
    return i, _fraction(tables.values[first + i], tables.values[first + i + 1], log_tokens)


@compiled_leaf
def _fraction(low: float, high: float, at: float) -> float:
    """The place of ``at`` between two grid points, in [0, 1]."""
    return min(max((at - low) / (high - low), 0.0), 1.0)


@compiled_leaf
def _bilinear(tables: CostTables, profile: int, keys: Keys, i: int, a: float) -> float:
    """The rate at ``keys``, ``a`` of the way from the ``i``-th number of queries to the next."""
    rate, n_kv, b = tables.values, tables.layout[profile, _N_KV], keys.share
    at = keys.at + i * n_kv
    low: float = (1.0 - b) * rate[at] + b * rate[at + 1]
    high: float = (1.0 - b) * rate[at + n_kv] + b * rate[at + n_kv + 1]
    return (1.0 - a) * low + a * high


@compiled
def _fill_uncut_rates(tables: CostTables, uncut_rates: Float64Array) -> None:
    for length in range(UNCUT_TOKENS):
        uncut_rates[length] = pair_seconds_of_both(tables, 0, float(length), float(length))


@compiled_leaf
def causal_pairs(q_begin: int, q_end: int) -> float:
    """Query-key pairs of queries ``[q_begin, q_end)``."""
    return 0.5 * (q_end - q_begin) * (q_begin + q_end + 1.0)


@compiled_leaf
def task_seconds(tables: CostTables, profile: int, phase: int, q_begin: int, q_end: int) -> float:
    """Seconds of the task of queries ``[q_begin, q_end)``; 0 if it is empty."""
    if q_end <= q_begin:
        return 0.0
    rate = pair_seconds(tables, profile, phase, float(q_end - q_begin), float(q_end))
    return causal_pairs(q_begin, q_end) * rate


class Pace(NamedTuple):
    """The pace of one server in one phase: its row of the tables, and its speed, which is not 0."""

    tables: CostTables
    profile: int
    phase: int
    speed: float


@compiled_leaf
def pace_seconds(pace: Pace, q_begin: int, q_end: int) -> float:
    """Seconds of the task of queries ``[q_begin, q_end)``; 0 if it is empty."""
    return task_seconds(pace.tables, pace.profile, pace.phase, q_begin, q_end) / pace.speed
