"""The servers of a step as columns: what compiled code needs to know of each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from control_plane.planner.compiled import BoolArray, compiled_inner
from control_plane.planner.costs import CostTables, Pace, pack_profiles
from control_plane.planner.planning import NO_BASE, PlanningServer
from core_attention.arrays import Float64Array, Int64Array, frozen
from core_attention.errors import PlanError

UNLIMITED_ROWS = 2**62
"""``capacity_rows`` of a server without a limit: more than any step has rows."""
REMEMBERED = 16
"""Sets of servers whose places and hosts are remembered: those of a few jobs."""


class Fleet(NamedTuple):
    """Servers as columns, in the order of the plan.

    Attributes:
        rank: ``[n_servers]`` the rank whose process a server shares, -1 for a pool server.
        server_of_rank: ``[n_ranks]`` its inverse, -1 for a rank without an in-place server.
        profile: ``[n_servers]`` index into ``tables``.
        speed: ``[n_servers]`` correction of the profile; 0 takes no work.
        capacity_rows: ``[n_servers]`` q plus k/v rows it can hold.
        is_limited: whether any server has a limit to them.
        receives: ``[n_servers]`` whether it may be given work of other homes.
        base: ``[2, n_servers]`` seconds beside attention in each phase.
        is_based: whether there are any.
        tables: the profiles.
        uncut_rates: ``[n_profiles, UNCUT_TOKENS, 2]`` of ``costs.pack_profiles``.
    """

    rank: Int64Array
    server_of_rank: Int64Array
    profile: Int64Array
    speed: Float64Array
    capacity_rows: Int64Array
    is_limited: bool
    receives: BoolArray
    base: Float64Array
    is_based: bool
    tables: CostTables
    uncut_rates: Float64Array


def build_fleet(servers: Sequence[PlanningServer], n_ranks: int) -> Fleet:
    """The columns of ``servers``."""
    if not servers:
        raise PlanError("no servers: a plan needs at least one")
    places = _places(tuple([server.server.in_place_rank for server in servers]), n_ranks)
    if places.outside is not None:
        at = places.outside
        raise PlanError(
            f"server {servers[at].server.server_id} is in-place on rank {places.rank[at]}; the "
            f"step has ranks 0 to {n_ranks - 1}"
        )
    if places.twice is not None:
        at = places.twice
        other = servers[int(places.server_of_rank[places.rank[at]])].server.server_id
        raise PlanError(
            f"servers {servers[at].server.server_id} and {other} are both in-place on rank "
            f"{places.rank[at]}; a rank has one in-place server at most"
        )
    tables, uncut_rates, profile = pack_profiles([server.profile for server in servers])
    capacity_rows = [server.capacity_rows for server in servers]
    is_limited = capacity_rows.count(None) < len(servers)
    if is_limited:
        capacity_rows = [UNLIMITED_ROWS if most is None else most for most in capacity_rows]
        rows = np.array(capacity_rows, dtype=np.int64)
    else:
        rows = np.full(len(servers), UNLIMITED_ROWS, dtype=np.int64)
    is_based = any(server.base_seconds != NO_BASE for server in servers)
    base = np.zeros((2, len(servers)))
    if is_based:
        base[:] = np.array([server.base_seconds for server in servers]).T
    return Fleet(
        rank=places.rank,
        server_of_rank=places.server_of_rank,
        profile=profile,
        speed=np.array([server.speed for server in servers], dtype=np.float64),
        capacity_rows=rows,
        is_limited=is_limited,
        receives=np.array([server.receives for server in servers], dtype=np.bool_),
        base=base,
        is_based=is_based,
        tables=tables,
        uncut_rates=uncut_rates,
    )


class _Places(NamedTuple):
    """``rank`` and ``server_of_rank`` of ``Fleet``; a server on a rank that does not exist, and one
    on the same rank as another, if there are any."""

    rank: Int64Array
    server_of_rank: Int64Array
    outside: int | None
    twice: int | None


@lru_cache(maxsize=REMEMBERED)
def _places(in_place: tuple[int | None, ...], n_ranks: int) -> _Places:
    """The places of servers, from ``in_place_rank`` of each; mostly the same in every step of a
    job."""
    rank = np.array([-1 if r is None else r for r in in_place], dtype=np.int64)
    server_of_rank = np.full(n_ranks, -1, dtype=np.int64)
    own = np.flatnonzero(rank != -1)
    outside = own[(rank[own] < 0) | (rank[own] >= n_ranks)]
    if outside.size:
        return _Places(frozen(rank), frozen(server_of_rank), int(outside[0]), None)
    server_of_rank[rank[own]] = own
    twice = own[server_of_rank[rank[own]] != own]
    at = int(twice[0]) if twice.size else None
    return _Places(frozen(rank), frozen(server_of_rank), None, at)


@compiled_inner
def pace_of(fleet: Fleet, server: int, phase: int) -> Pace:
    """The pace of ``server`` in ``phase``. Not for compiled leaves: it returns arrays."""
    return Pace(fleet.tables, fleet.profile[server], phase, float(fleet.speed[server]))
