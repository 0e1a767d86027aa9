"""Cost profiles as flat tables that compiled code reads: the same numbers as ``CostProfile``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from control_plane.planner.compiled import compiled_inner
from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase, causal_qk_pairs
from core_attention.cost_model import CostProfile

FORWARD, BACKWARD = 0, 1
PHASE_INDEX = {Phase.FORWARD: FORWARD, Phase.BACKWARD: BACKWARD}


OCTAVES = 32
"""Token counts have 31 bits: the cell of a grid is looked up by the leading one."""

_PER_OCTAVE = 1.0 / math.log(2.0)


class CostTables(NamedTuple):
    """The profiles of all servers, one after another.

    Attributes:
        log_q, first_q: profile p has its q grid, in logarithms, at
            ``log_q[first_q[p]:first_q[p + 1]]``.
        log_kv, first_kv: the same for its kv grid.
        rate, first_rate: seconds per query-key pair, ``[2, n_q, n_kv]`` flattened (forward, then
            backward), at ``rate[first_rate[p]:first_rate[p + 1]]``.
        octave_q, octave_kv: the grid cell of 2^k tokens at ``[OCTAVES * p + k]``.
    """

    log_q: Float64Array
    first_q: Int64Array
    log_kv: Float64Array
    first_kv: Int64Array
    rate: Float64Array
    first_rate: Int64Array
    octave_q: Int64Array
    octave_kv: Int64Array


class _Flat(NamedTuple):
    """One profile's share of the tables."""

    log_q: Float64Array
    log_kv: Float64Array
    rate: Float64Array
    octave_q: Int64Array
    octave_kv: Int64Array


# A profile is immutable, so what is derived from it once holds as long as it lives.
_flat_of_profile: WeakKeyDictionary[CostProfile, _Flat] = WeakKeyDictionary()


def pack_profiles(profiles: Sequence[CostProfile]) -> tuple[CostTables, Int64Array]:
    """The tables of ``profiles``, and for each of them its index in the tables.

    Servers that share one profile object share its table.
    """
    index_of: dict[CostProfile, int] = {}
    index = np.array([index_of.setdefault(p, len(index_of)) for p in profiles], dtype=np.int64)
    flat = [_flatten(profile) for profile in index_of]
    log_q, first_q = _joined([f.log_q for f in flat])
    log_kv, first_kv = _joined([f.log_kv for f in flat])
    rate, first_rate = _joined([f.rate for f in flat])
    octave_q = np.concatenate([f.octave_q for f in flat])
    octave_kv = np.concatenate([f.octave_kv for f in flat])
    tables = CostTables(log_q, first_q, log_kv, first_kv, rate, first_rate, octave_q, octave_kv)
    return tables, index


def _joined(parts: list[Float64Array]) -> tuple[Float64Array, Int64Array]:
    first = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum([len(part) for part in parts], out=first[1:])
    return np.concatenate(parts), first


def _flatten(profile: CostProfile) -> _Flat:
    flat = _flat_of_profile.get(profile)
    if flat is None:
        kv = np.maximum(profile.kv_tokens[None, :], profile.q_tokens[:, None])
        pairs = causal_qk_pairs(kv - profile.q_tokens[:, None], kv)
        rate = np.stack([profile.forward_seconds / pairs, profile.backward_seconds / pairs])
        flat = _Flat(
            log_q=np.log(profile.q_tokens),
            log_kv=np.log(profile.kv_tokens),
            rate=rate.ravel(),
            octave_q=_octaves(profile.q_tokens),
            octave_kv=_octaves(profile.kv_tokens),
        )
        _flat_of_profile[profile] = flat
    return flat


def _octaves(grid: Int64Array) -> Int64Array:
    cell = np.searchsorted(grid, 2 ** np.arange(OCTAVES), side="right") - 1
    return np.minimum(cell, len(grid) - 2).astype(np.int64)


@compiled_inner
def _cell(
    grid: Float64Array, begin: int, end: int, octave: Int64Array, first_octave: int, at: float
) -> tuple[int, float]:
    """The cell of ``grid[begin:end]`` that holds ``at``, from 0, and where in it, in [0, 1]."""
    low = begin + octave[first_octave + min(int(at * _PER_OCTAVE), OCTAVES - 1)]
    while low < end - 2 and grid[low + 1] <= at:
        low += 1
    fraction = (at - grid[low]) / (grid[low + 1] - grid[low])
    return low - begin, min(max(fraction, 0.0), 1.0)


@compiled_inner
def pair_seconds_of_both(
    tables: CostTables, profile: int, q: float, kv: float
) -> tuple[float, float]:
    """Seconds per query-key pair of a task of ``q`` queries and ``kv`` keys: forward, backward."""
    q_begin, q_end = tables.first_q[profile], tables.first_q[profile + 1]
    kv_begin, kv_end = tables.first_kv[profile], tables.first_kv[profile + 1]
    log_q = math.log(max(q, 1.0))
    log_kv = log_q if kv == q else math.log(max(kv, 1.0))
    octave = profile * OCTAVES
    i, a = _cell(tables.log_q, q_begin, q_end, tables.octave_q, octave, log_q)
    j, b = _cell(tables.log_kv, kv_begin, kv_end, tables.octave_kv, octave, log_kv)
    n_q, n_kv = q_end - q_begin, kv_end - kv_begin
    at = tables.first_rate[profile] + i * n_kv + j
    forward = _bilinear(tables.rate, at, n_kv, a, b)
    return forward, _bilinear(tables.rate, at + n_q * n_kv, n_kv, a, b)


@compiled_inner
def _bilinear(rate: Float64Array, at: int, n_kv: int, a: float, b: float) -> float:
    low = (1.0 - b) * rate[at] + b * rate[at + 1]
    high = (1.0 - b) * rate[at + n_kv] + b * rate[at + n_kv + 1]
    return (1.0 - a) * low + a * high


@compiled_inner
def pair_seconds(tables: CostTables, profile: int, phase: int, q: float, kv: float) -> float:
    """Seconds per query-key pair of a task of ``q`` queries and ``kv`` keys."""
    forward, backward = pair_seconds_of_both(tables, profile, q, kv)
    return forward if phase == FORWARD else backward


@compiled_inner
def causal_pairs(q_begin: int, q_end: int) -> float:
    """Query-key pairs of queries ``[q_begin, q_end)``."""
    return 0.5 * (q_end - q_begin) * (q_begin + q_end + 1.0)


@compiled_inner
def task_seconds(tables: CostTables, profile: int, phase: int, q_begin: int, q_end: int) -> float:
    """Seconds of the task of queries ``[q_begin, q_end)``; 0 if it is empty."""
    if q_end <= q_begin:
        return 0.0
    rate = pair_seconds(tables, profile, phase, float(q_end - q_begin), float(q_end))
    return causal_pairs(q_begin, q_end) * rate
