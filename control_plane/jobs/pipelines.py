"""Pipelines of a job: ranks with the same documents, each with some of the layers.

Core attention treats them as any ranks: what one stage's rows need says nothing of another's. Only
the model ties them together. If a stage held other documents than the one below, it would compute
attention over rows that belong to others, and nobody would see it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from control_plane.jobs.held_documents import SHOWN, held_documents, shown_lengths
from core_attention.manifest import RankManifest
from core_attention.pipelining import Pipelining


def difference_of_stages(pipelining: Pipelining, manifests: Mapping[int, RankManifest]) -> str:
    """Describe a rank with documents that no rank with the first stages holds; empty if none.

    Which ranks are of one pipeline is not known: only their places are.

    Args:
        pipelining: of the job.
        manifests: of all its ranks, of one step. Ids of documents are each rank's own.
    """
    by_place: dict[int, dict[int, bytes]] = defaultdict(dict)
    for rank, manifest in sorted(manifests.items()):
        by_place[pipelining.pipeline_ranks[rank]][rank] = held_documents(manifest)
    first = by_place[0]
    for place, held in sorted(by_place.items()):
        left = Counter(first.values())
        for rank, documents in held.items():
            if not left[documents]:
                other = next(rank for rank, its in first.items() if left[its])
                theirs = shown_lengths(manifests[other])
                return (
                    f"rank {rank}, rank {place} of its pipeline, holds other documents than ranks "
                    f"{list(first)[:SHOWN]}, which have the first stages: rank {rank} "
                    f"{shown_lengths(manifests[rank])}, rank {other} {theirs}; submit the same "
                    "nano-batches on all ranks of a pipeline"
                )
            left[documents] -= 1
    return ""
