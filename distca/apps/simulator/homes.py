"""Homes of documents by the planner, so that few bytes move."""

from __future__ import annotations

from control_plane.planner.homes import plan_homes
from control_plane.planner.planning import PlanningOptions, equal_servers
from core_attention.arrays import Int64Array
from core_attention.cost_model import CostProfile
from core_attention.manifest import Manifest
from distca.apps.simulator.disaggregated import Packer


def planned_homes(profile: CostProfile, options: PlanningOptions) -> Packer:
    """A packer for ranks that are all alike: :func:`control_plane.planner.homes.plan_homes`.

    Args:
        profile: kernel cost of one rank.
        options: of the planner that will plan the step.
    """

    def pack(
        lengths: Int64Array, n_ranks: int, tokens_per_rank: int, n_nano_batches: int
    ) -> Manifest:
        homes = plan_homes(
            lengths,
            n_ranks,
            tokens_per_rank,
            equal_servers(n_ranks, profile),
            options,
            n_nano_batches=n_nano_batches,
        )
        return Manifest.merge(homes, n_ranks)

    return pack
