"""Donors: the servers above their cap, those with the most to give first."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from control_plane.planner.compiled import compiled_inner, compiled_leaf
from control_plane.planner.fleet import Fleet
from control_plane.planner.links import Links
from core_attention.arrays import Float64Array, Int64Array

N_DONORS, N_VISITS = 0, 1


class Donors(NamedTuple):
    """Who is above its cap, by how much.

    Attributes:
        server: ``[n_servers]`` the donors, most query-key pairs to give first.
        need: ``[n_servers]`` query-key pairs that a server should give; 0 for all but donors.
        bound: ``[n_servers]`` most pairs per byte that a donor can still give: rooms and needs
            only shrink, so what was found once bounds what will be found later.
        visited: ``[n_servers]`` the last search that looked at a server.
        host_first, of_host: the servers of each host: ``of_host[host_first[h]:host_first[h + 1]]``.
        counts: ``[2]`` the number of donors, and of searches.
    """

    server: Int64Array
    need: Float64Array
    bound: Float64Array
    visited: Int64Array
    host_first: Int64Array
    of_host: Int64Array
    counts: Int64Array


@compiled_inner
def no_donors(links: Links) -> Donors:
    """The hosts of all servers; :func:`gather_donors` finds the donors."""
    n_servers = len(links.server_host)
    host_first = np.zeros(links.server_host.max() + 2, dtype=np.int64)
    for host in links.server_host:
        host_first[host + 1] += 1
    host_first = np.cumsum(host_first)
    fill, of_host = host_first.copy(), np.empty(n_servers, dtype=np.int64)
    for server in range(n_servers):
        host = links.server_host[server]
        of_host[fill[host]] = server
        fill[host] += 1
    return Donors(
        np.empty(n_servers, dtype=np.int64),
        np.zeros(n_servers),
        np.empty(n_servers),
        np.zeros(n_servers, dtype=np.int64),
        host_first,
        of_host,
        np.zeros(2, dtype=np.int64),
    )


@compiled_leaf
def gather_donors(
    donors: Donors,
    fleet: Fleet,
    load: Float64Array,
    cap: Float64Array,
    slack: float,
    pair_rate: Float64Array,
    every: int,
) -> None:
    """Finds the in-place servers more than ``slack`` seconds above their cap; only one in
    ``every`` of them counts."""
    n = passed = 0
    for server in range(len(load)):
        donors.need[server] = 0.0
        donors.bound[server] = np.inf
        if load[server] > cap[server] + slack and fleet.rank[server] >= 0:
            passed += 1
            if passed % every:
                continue
            need = (load[server] - cap[server]) / pair_rate[server]
            donors.need[server] = need
            at = n
            while at > 0 and donors.need[donors.server[at - 1]] < need:
                donors.server[at] = donors.server[at - 1]
                at -= 1
            donors.server[at] = server
            n += 1
    donors.counts[N_DONORS] = n


@compiled_leaf
def has_given(donors: Donors, server: int, need: float) -> None:
    """Puts a donor that gave a chunk at its new place; 0 or less: it is none any more."""
    need = max(need, 0.0)
    n = donors.counts[N_DONORS]
    donors.need[server] = need
    at = 0
    while donors.server[at] != server:
        at += 1
    while at + 1 < n and donors.need[donors.server[at + 1]] > need:
        donors.server[at] = donors.server[at + 1]
        at += 1
    donors.server[at] = server
    if need == 0.0:
        # All others have something left, so it came last.
        donors.counts[N_DONORS] = n - 1
