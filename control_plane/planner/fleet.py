"""The servers of a step as columns: what compiled code needs to know of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from control_plane.planner.compiled import BoolArray, compiled_inner
from control_plane.planner.costs import CostTables, Pace, pack_profiles
from control_plane.planning import PlanningServer
from core_attention.arrays import Float64Array, Int64Array
from core_attention.errors import PlanError

UNLIMITED_ROWS = 2**62
"""``capacity_rows`` of a server without a limit: more than any step has rows."""


class Fleet(NamedTuple):
    """Servers as columns, in the order of the plan.

    Attributes:
        rank: ``[n_servers]`` the rank whose process a server shares, -1 for a pool server.
        server_of_rank: ``[n_ranks]`` its inverse, -1 for a rank without an in-place server.
        profile: ``[n_servers]`` index into ``tables``.
        speed: ``[n_servers]`` correction of the profile; 0 takes no work.
        capacity_rows: ``[n_servers]`` q plus k/v rows it can hold.
        receives: ``[n_servers]`` whether it may be given work of other homes.
        tables: the profiles.
        uncut_rates: ``[n_profiles, UNCUT_TOKENS, 2]`` of ``costs.pack_profiles``.
    """

    rank: Int64Array
    server_of_rank: Int64Array
    profile: Int64Array
    speed: Float64Array
    capacity_rows: Int64Array
    receives: BoolArray
    tables: CostTables
    uncut_rates: Float64Array


def build_fleet(servers: Sequence[PlanningServer], n_ranks: int) -> Fleet:
    """The columns of ``servers``.

    Raises:
        PlanError: there are none, or in-place servers name a rank that does not exist or the same.
    """
    if not servers:
        raise PlanError("no servers: a plan needs at least one")
    tables, uncut_rates, profile = pack_profiles([server.profile for server in servers])
    in_place = [server.server.in_place_rank for server in servers]
    rank = np.array([-1 if r is None else r for r in in_place], dtype=np.int64)
    server_of_rank = np.full(n_ranks, -1, dtype=np.int64)
    own = np.flatnonzero(rank != -1)
    outside = own[(rank[own] < 0) | (rank[own] >= n_ranks)]
    if outside.size:
        at = int(outside[0])
        raise PlanError(
            f"server {servers[at].server.server_id} is in-place on rank {rank[at]}; the step has "
            f"ranks 0 to {n_ranks - 1}"
        )
    server_of_rank[rank[own]] = own
    twice = own[server_of_rank[rank[own]] != own]
    if twice.size:
        at = int(twice[0])
        other = servers[int(server_of_rank[rank[at]])].server.server_id
        raise PlanError(
            f"servers {servers[at].server.server_id} and {other} are both in-place on rank "
            f"{rank[at]}; a rank has one in-place server at most"
        )
    return Fleet(
        rank=rank,
        server_of_rank=server_of_rank,
        profile=profile,
        speed=np.array([server.speed for server in servers], dtype=np.float64),
        capacity_rows=np.array(
            [
                UNLIMITED_ROWS if server.capacity_rows is None else server.capacity_rows
                for server in servers
            ],
            dtype=np.int64,
        ),
        receives=np.array([server.receives for server in servers], dtype=np.bool_),
        tables=tables,
        uncut_rates=uncut_rates,
    )


@compiled_inner
def pace_of(fleet: Fleet, server: int, phase: int) -> Pace:
    """How fast ``server`` runs ``phase``. Not for compiled leaves: it returns arrays."""
    return Pace(fleet.tables, fleet.profile[server], phase, float(fleet.speed[server]))
