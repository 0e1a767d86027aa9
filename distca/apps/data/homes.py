"""Planned homes: the documents of a step, laid out so that the fewest bytes move.

Every rank computes the layout of all ranks, so it must not depend on anything measured: the cost of
attention is taken as proportional to query-key pairs. The planner then levels what the servers'
own profiles say.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from control_plane.planner.homes import plan_homes
from control_plane.planner.planning import PlanningOptions, equal_servers
from core_attention.arrays import Float64Array
from core_attention.ca_task import causal_qk_pairs
from core_attention.cost_model import CostProfile
from core_attention.shape import AttentionShape
from distca.apps.data.packing import PackedDocument, PackedStep, Piece

_GRID = np.array([2**power for power in range(25)])
"""Lengths from 1 to 16 million tokens; rates do not change beyond the grid."""


def plan_step_homes(packed: PackedStep, options: PlanningOptions) -> PackedStep:
    """The same documents with planned homes; in the same nano-batches, unless documents may be cut
    between them.

    Args:
        packed: the step as packed; every rank's nano-batch keeps its number of rows.
        options: of the planner that will plan the step.

    Returns:
        A step whose documents may span ranks.
    """
    shape = packed.shape
    together = 2 if shape.cut_documents else 1
    documents: list[PackedDocument] = []
    for first in range(0, shape.n_nano_batches, together):
        chosen = [d for d in packed.documents if first <= d.nano_batch < first + together]
        manifests = plan_homes(
            [document.length for document in chosen],
            shape.n_ranks,
            shape.nano_batch_tokens * together,
            equal_servers(shape.n_ranks, _pairs_profile()),
            options,
            n_nano_batches=together,
            cuts_documents=shape.cut_documents,
        )
        pieces: list[list[Piece]] = [[] for _ in chosen]
        for manifest in manifests:
            for nano_batch, segments in enumerate(manifest.nano_batches, first):
                for segment in segments:
                    pieces[segment.document_id].append(
                        Piece(nano_batch, manifest.rank, segment.offset, segment.length)
                    )
        documents += [
            replace(document, segments=tuple(sorted(held, key=lambda piece: piece.offset)))
            for document, held in zip(chosen, pieces, strict=True)
        ]
    return replace(packed, documents=tuple(documents))


def _pairs_profile() -> CostProfile:
    """One nanosecond a query-key pair."""
    kv = np.maximum(_GRID[None, :], _GRID[:, None])
    seconds: Float64Array = 1e-9 * causal_qk_pairs(kv - _GRID[:, None], kv).astype(np.float64)
    return CostProfile(
        device="query-key pairs",
        kernel="none",
        shape=AttentionShape(
            num_heads=1, num_heads_kv=1, head_dim=1, head_dim_v=1, dtype="float32"
        ),
        q_tokens=_GRID,
        kv_tokens=_GRID,
        forward_seconds=seconds,
        backward_seconds=seconds,
    )
