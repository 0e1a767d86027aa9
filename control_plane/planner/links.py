"""Links: what a byte costs between a rank and a server."""

from __future__ import annotations

from typing import NamedTuple

from control_plane.planner.compiled import compiled_leaf
from core_attention.arrays import Int64Array


class Links(NamedTuple):
    """Cost of a byte between a rank and a server.

    Attributes:
        rank_host: ``[n_ranks]`` index of the rank's machine, -1 if unknown.
        server_host: ``[n_servers]`` index of the server's machine.
        near, far: cost of a byte inside a machine and between two.
    """

    rank_host: Int64Array
    server_host: Int64Array
    near: float
    far: float


@compiled_leaf
def link_cost(links: Links, rank: int, server: int) -> float:
    """Cost of a byte between ``rank`` and ``server``."""
    host = links.rank_host[rank]
    return links.near if host >= 0 and host == links.server_host[server] else links.far
