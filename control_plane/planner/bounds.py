"""The bounds of a plan: places of cuts, capacities of servers, and the cost of a byte."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from control_plane.planner.chunk import CutRules, cut_rules
from control_plane.planner.costs import PHASE_INDEX
from control_plane.planner.fleet import REMEMBERED, Fleet
from control_plane.planner.forecast import row_bytes
from control_plane.planner.links import Links
from control_plane.planner.planning import PlanningOptions, PlanningServer
from core_attention.arrays import Int64Array, frozen
from core_attention.ca_task import Phase
from core_attention.errors import PlanError
from core_attention.shape import AttentionShape

MOST_VARIANTS = 64
VARIANT_SERVERS = 384
"""Small fleets are planned ``VARIANT_SERVERS / n_servers`` times, each time with other near-ties,
and the cheapest plan wins: it costs little time there, and one chunk more or less weighs most."""


def n_variants(n_servers: int) -> int:
    """How many plans are made of a phase of a nano-batch, to choose from."""
    return min(max(VARIANT_SERVERS // n_servers, 1), MOST_VARIANTS)


def rules_of(shape: AttentionShape, phase: Phase, options: PlanningOptions) -> CutRules:
    per_row = row_bytes(shape, phase)
    forward = phase is Phase.FORWARD
    return cut_rules(
        PHASE_INDEX[phase],
        per_row.q_request + per_row.q_reply,
        per_row.kv_request + per_row.kv_reply,
        options.min_forward_tokens if forward else options.min_backward_tokens,
        options.finest_cut_tokens,
    )


def links_of(servers: Sequence[PlanningServer], fleet: Fleet, options: PlanningOptions) -> Links:
    """The hosts of servers, and the cost of a byte: 1 between hosts."""
    n_ranks = len(fleet.server_of_rank)
    if options.rank_hosts is not None and len(options.rank_hosts) != n_ranks:
        raise PlanError(
            f"rank_hosts names {len(options.rank_hosts)} hosts; the step has {n_ranks} ranks"
        )
    hosts = tuple([server.host for server in servers])
    server_host, known_rank_host = _host_columns(hosts, options.rank_hosts, n_ranks)
    rank_host = known_rank_host.copy()
    in_place = fleet.rank >= 0
    rank_host[fleet.rank[in_place]] = server_host[in_place]
    near = options.network_bytes_per_second / options.host_bytes_per_second
    return Links(rank_host, server_host, near, 1.0)


@lru_cache(maxsize=REMEMBERED)
def _host_columns(
    hosts: tuple[str, ...], rank_hosts: tuple[str, ...] | None, n_ranks: int
) -> tuple[Int64Array, Int64Array]:
    """``[n_servers]`` index of each server's host, and ``[n_ranks]`` of each rank's as far as
    ``rank_hosts`` say, -1 for others; mostly the same in every step of a job."""
    index: dict[str, int] = {}
    server_host = np.array([index.setdefault(host, len(index)) for host in hosts], dtype=np.int64)
    rank_host = np.full(n_ranks, -1, dtype=np.int64)
    if rank_hosts is not None:
        rank_host[:] = [index.get(host, -1) for host in rank_hosts]
    return frozen(server_host), frozen(rank_host)
