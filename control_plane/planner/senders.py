"""Senders: the servers above their cap, those with the most to give first."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from control_plane.planner.chunk import CutRules
from control_plane.planner.compiled import compiled_inner, compiled_leaf
from control_plane.planner.fleet import Fleet
from control_plane.planner.links import Links
from core_attention.arrays import Float64Array, Int64Array

N_SENDERS, N_VISITS = 0, 1
MOST, STRENGTH = 0, 1

FEW_RECEIVERS, MANY_RECEIVERS = 2.0, 4.0
"""Urgency grows from nothing to all between the two: surplus of the largest sender, in caps. Who
needs no more than a few receivers finds them anyway."""


class Senders(NamedTuple):
    """The servers above their cap, and by how much.

    Attributes:
        server: ``[n_servers]`` the senders, those that had the most to give first.
        need: ``[n_servers]`` query-key pairs that a server should give; 0 for all but senders.
        urgency: ``[n_servers]`` factor on the value of a sender's chunks, falling with the square
            of what it had to give at first; 0 for those who were no senders yet. Wide rooms go to
            those who need many: in narrow ones they would repeat their many keys most often, and
            the busiest rank is one of them. Others lose little in narrow rooms.
        far: ``[n_servers]`` what a byte of the chunks of each of ``server`` costs between hosts,
            over its urgency.
        bound: ``[n_servers]`` most pairs per byte that each of ``server`` can still give: rooms and
            needs only shrink, so what was found once bounds what will be found later. All are
            passed by in every search, so they lie in its order.
        visited: ``[n_servers]`` the last search that looked at a server.
        host_first, of_host: the servers of each host: ``of_host[host_first[h]:host_first[h + 1]]``.
        first: ``[2]`` of the first senders: the most query-key pairs that one had to give, and how
            much more its chunks count than those of one with next to nothing.
        counts: ``[2]`` the number of senders, and of searches.
    """

    server: Int64Array
    need: Float64Array
    urgency: Float64Array
    far: Float64Array
    bound: Float64Array
    visited: Int64Array
    host_first: Int64Array
    of_host: Int64Array
    first: Float64Array
    counts: Int64Array


@compiled_inner
def no_senders(links: Links) -> Senders:
    """The hosts of all servers; :func:`gather_senders` finds the senders."""
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
    return Senders(
        np.empty(n_servers, dtype=np.int64),
        np.zeros(n_servers),
        np.zeros(n_servers),
        np.empty(n_servers),
        np.empty(n_servers),
        np.zeros(n_servers, dtype=np.int64),
        host_first,
        of_host,
        np.zeros(2),
        np.zeros(2, dtype=np.int64),
    )


@compiled_leaf
def gather_senders(
    senders: Senders,
    fleet: Fleet,
    links: Links,
    rules: CutRules,
    load: Float64Array,
    cap: Float64Array,
    slack: float,
    pair_rate: Float64Array,
    urgency: float,
    every: int,
) -> None:
    """Finds the in-place servers more than ``slack`` seconds above their cap; only one in
    ``every`` of them counts. ``urgency``: of :class:`~control_plane.planner.candidates.Variant`."""
    n = 0
    most = most_caps = most_cap = 0.0
    for server in range(len(cap)):
        most_cap = max(most_cap, cap[server])
    for server in range(len(load)):
        senders.need[server] = 0.0
        if load[server] > cap[server] + slack and fleet.rank[server] >= 0:
            need = (load[server] - cap[server]) / pair_rate[server]
            senders.need[server] = need
            senders.server[n] = server
            n += 1
            most = max(most, need)
            most_caps = max(most_caps, (load[server] - cap[server]) / most_cap)
    if senders.first[MOST] == 0.0:
        many = (most_caps - FEW_RECEIVERS) / (MANY_RECEIVERS - FEW_RECEIVERS)
        senders.first[MOST] = most
        senders.first[STRENGTH] = urgency * min(max(many, 0.0), 1.0)
    for k in range(n):
        server = senders.server[k]
        if senders.urgency[server] == 0.0:
            share = min(senders.need[server] / senders.first[MOST], 1.0)
            senders.urgency[server] = 1.0 + senders.first[STRENGTH] * share * share
        at = k
        while at > 0 and senders.urgency[senders.server[at - 1]] < senders.urgency[server]:
            senders.server[at] = senders.server[at - 1]
            at -= 1
        senders.server[at] = server
    if every > 1:
        n = _sample(senders, n, every)
    for k in range(n):
        server = senders.server[k]
        senders.far[k] = links.far / senders.urgency[server]
        senders.bound[k] = math.sqrt(senders.need[server]) * rules.ideal
    senders.counts[N_SENDERS] = n


@compiled_leaf
def _sample(senders: Senders, n: int, every: int) -> int:
    """Leaves one in ``every`` of the ``n`` senders, of those with much and with little to give
    alike; returns how many."""
    kept = 0
    for k in range(n):
        server = senders.server[k]
        if k % every == every // 2:
            senders.server[kept] = server
            kept += 1
        else:
            senders.need[server] = 0.0
    return kept


@compiled_leaf
def has_given(senders: Senders, rules: CutRules, server: int, need: float) -> None:
    """Notes what a sender that gave a chunk should still give; 0 or less: it is none any more."""
    need = max(need, 0.0)
    senders.need[server] = need
    at = 0
    while senders.server[at] != server:
        at += 1
    senders.bound[at] = min(senders.bound[at], math.sqrt(need) * rules.ideal)
    if need > 0.0:
        return
    last = senders.counts[N_SENDERS] - 1
    senders.counts[N_SENDERS] = last
    for k in range(at, last):
        senders.server[k] = senders.server[k + 1]
        senders.far[k], senders.bound[k] = senders.far[k + 1], senders.bound[k + 1]
