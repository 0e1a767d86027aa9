"""Homes of documents by the planner, so that the fewest bytes move."""

from __future__ import annotations

from dataclasses import replace

from control_plane.planner.homes import plan_homes
from control_plane.planner.planning import PlanningOptions, equal_servers
from core_attention.arrays import Int64Array
from core_attention.cost_model import CostProfile
from core_attention.errors import PlanError
from core_attention.manifest import Manifest, RankManifest
from distca.apps.simulator.disaggregated import Packer
from distca.apps.simulator.packing import check_tokens, take_steps

Homes = list[RankManifest]

_ID_BITS = 32
"""Document ids of a nano-batch are below 2 to this power."""


def planned_homes(profile: CostProfile, options: PlanningOptions) -> Packer:
    """A packer for ranks that are all alike: :func:`control_plane.planner.homes.plan_homes`.

    Args:
        profile: kernel cost of one rank.
        options: of the planner that will plan the step.
    """

    def plan(lengths: Int64Array, n_ranks: int, rows: int, n_nano_batches: int) -> Homes:
        servers = equal_servers(n_ranks, profile)
        return plan_homes(
            lengths,
            n_ranks,
            rows,
            servers,
            options,
            n_nano_batches=n_nano_batches,
        )

    def pack(
        lengths: Int64Array, n_ranks: int, tokens_per_rank: int, n_nano_batches: int
    ) -> Manifest:
        check_tokens(lengths, n_ranks, tokens_per_rank, n_nano_batches)
        try:
            homes = plan(lengths, n_ranks, tokens_per_rank, n_nano_batches)
        except PlanError:
            if n_nano_batches == 1:
                raise
            # A few long documents may not divide into nano-batches of exactly equal tokens: then
            # the one that crosses is cut, as plain packing does.
            rows = tokens_per_rank // n_nano_batches
            streams = take_steps(lengths, n_nano_batches, n_ranks * rows)
            homes = _side_by_side([plan(stream, n_ranks, rows, 1) for stream in streams])
        return Manifest.merge(homes, n_ranks)

    return pack


def _side_by_side(nano_batches: list[Homes]) -> Homes:
    """Manifests of one nano-batch each as manifests of all; document ids are made unique."""
    return [
        RankManifest(
            ranks[0].step,
            ranks[0].rank,
            tuple(
                tuple(
                    replace(segment, document_id=segment.document_id + (k << _ID_BITS))
                    for segment in rank.nano_batches[0]
                )
                for k, rank in enumerate(ranks)
            ),
        )
        for ranks in zip(*nano_batches, strict=True)
    ]
