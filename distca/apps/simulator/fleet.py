"""The attention servers of a simulated job: in-place, a pool, or both."""

from __future__ import annotations

from control_plane.planner.planning import PlanningServer
from core_attention.cost_model import CostProfile
from core_attention.plan import PlanServer
from distca.apps.simulator.cluster import ClusterSpec
from distca.contract.settings import Placement


def build_servers(
    cluster: ClusterSpec, profile: CostProfile, placement: Placement, n_pool_servers: int = 0
) -> tuple[PlanningServer, ...]:
    """The servers: one in each rank unless ``placement`` is POOL, then those of the pool.

    Pool servers are ranks of the same kind on hosts of their own, after the trainers'.

    Args:
        cluster: the trainers' machines.
        profile: kernel cost of one rank.
        placement: where servers run.
        n_pool_servers: 1 or more with a pool, 0 without.
    """
    if placement is Placement.IN_PLACE and n_pool_servers:
        raise ValueError(
            f"pool_servers is {n_pool_servers} with placement in-place; choose placement mixed or "
            "pool, or leave it 0"
        )
    if placement is not Placement.IN_PLACE and n_pool_servers < 1:
        raise ValueError(
            f"pool_servers (placement {placement}) is {n_pool_servers}; it must be 1 or more"
        )
    in_place = () if placement is Placement.POOL else range(cluster.n_ranks)
    names: list[tuple[str, int | None, int]] = [(f"rank-{rank}", rank, rank) for rank in in_place]
    names += [(f"pool-{i}", None, cluster.n_ranks + i) for i in range(n_pool_servers)]
    return tuple(
        PlanningServer(
            server=PlanServer(server_id=name, in_place_rank=rank, address=""),
            host=cluster.host_of(endpoint),
            profile=profile,
        )
        for name, rank, endpoint in names
    )
