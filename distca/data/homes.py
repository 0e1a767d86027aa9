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
from distca.data.packing import PackedDocument, PackedStep

_GRID = np.array([2**power for power in range(25)])
"""Lengths from 1 to 16 million tokens; rates do not change beyond the grid."""


def plan_step_homes(packed: PackedStep, options: PlanningOptions) -> PackedStep:
    """The same documents in the same nano-batches, with planned homes.

    Args:
        packed: the step as packed; every rank's nano-batch keeps its number of rows.
        options: of the planner that will plan the step.

    Returns:
        A step whose documents may span ranks.
    """
    servers = equal_servers(packed.shape.n_ranks, _pairs_profile())
    documents: list[PackedDocument] = []
    for nano_batch in range(packed.shape.n_nano_batches):
        chosen = [d for d in packed.documents if d.nano_batch == nano_batch]
        manifests = plan_homes(
            [document.length for document in chosen],
            packed.shape.n_ranks,
            packed.shape.nano_batch_tokens,
            servers,
            options,
        )
        pieces: list[list[tuple[int, int, int]]] = [[] for _ in chosen]
        for manifest in manifests:
            for segment in manifest.nano_batches[0]:
                pieces[segment.document_id].append((segment.offset, manifest.rank, segment.length))
        for document, held in zip(chosen, pieces, strict=True):
            segments = tuple((rank, offset, length) for offset, rank, length in sorted(held))
            documents.append(replace(document, segments=segments))
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
