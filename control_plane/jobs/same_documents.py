"""Ranks of a job with the same documents: of a tensor-parallel group, each with a share of the
heads, and of a pipeline, each with some of the layers.

Core attention treats them as any ranks: what one rank's heads or layers need says nothing of
another's. Only the model ties them together. If they held different documents, collectives would
add up what does not belong together, or a stage would compute attention over rows that belong to
others, and nobody would see it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from control_plane.errors import InvalidRequestError, RefusedError
from core_attention.manifest import NO_PARENT, RankManifest
from core_attention.pipelining import Pipelining
from distca.contract.rpc_errors import Reason
from distca.contract.tensor_parallel import group_fault

SHOWN = 8
"""How many of a list errors show."""

Group = tuple[int, ...]
"""Ranks in the order of their tensor-parallel indices; empty: the rank is in none."""


def check_group(rank: int, group: Group, n_ranks: int) -> None:
    """Checks what a rank says of its group."""
    if fault := group_fault(rank, group, n_ranks):
        raise InvalidRequestError(
            f"tensor_parallel_ranks of rank {rank} is {list(group)}; {fault}: each process is a "
            "rank of the job of its own"
        )


class TensorParallelGroups:
    """The tensor-parallel groups that the ranks of a job have named."""

    def __init__(self) -> None:
        self._of_rank: dict[int, Group] = {}

    def check(self, rank: int, group: Group) -> None:
        """Raises unless ``group`` fits what others have said."""
        for member in group or (rank,):
            known = self._of_rank.get(member, group)
            if known != group:
                raise RefusedError(
                    Reason.SPEC_MISMATCH,
                    f"rank {rank} gives tensor_parallel_ranks={list(group)}, and rank {member} is "
                    f"in the group {list(known)}; all ranks of a group must give the same",
                )

    def add(self, rank: int, group: Group) -> None:
        """``rank`` has joined, as one of ``group``."""
        self._of_rank.update(dict.fromkeys(group or (rank,), group))

    def group_of(self, rank: int) -> Group:
        """The group of ``rank``; empty in none."""
        return self._of_rank.get(rank, ())

    def is_first(self, rank: int) -> bool:
        """Return whether ``rank`` is the first of its group; in none it is."""
        return self._of_rank.get(rank, ())[:1] in ((), (rank,))

    def difference(self, manifests: Mapping[int, RankManifest]) -> str:
        """Describe a rank with other documents than the first of its group; empty if none.

        Args:
            manifests: of all ranks, of one step. Ids of documents are each rank's own.
        """
        for rank, manifest in manifests.items():
            first = manifests[self._of_rank[rank][0]] if self._of_rank.get(rank) else manifest
            if first is not manifest and _held_documents(first) != _held_documents(manifest):
                ranks = list(self._of_rank[rank])
                return (
                    f"ranks {first.rank} and {rank} are of one tensor-parallel group, {ranks}, and "
                    f"hold different documents: rank {first.rank} {_shown_lengths(first)}, rank "
                    f"{rank} {_shown_lengths(manifest)}; give all ranks of a group the same batches"
                )
        return ""


def difference_of_stages(pipelining: Pipelining, manifests: Mapping[int, RankManifest]) -> str:
    """Describe a rank with documents that no rank with the first stages holds; empty if none.

    Which ranks are of one pipeline is not known: only their places are.

    Args:
        pipelining: of the job.
        manifests: of all its ranks, of one step. Ids of documents are each rank's own.
    """
    by_place: dict[int, dict[int, bytes]] = defaultdict(dict)
    for rank, manifest in sorted(manifests.items()):
        by_place[pipelining.pipeline_ranks[rank]][rank] = _held_documents(manifest)
    first = by_place[0]
    for place, held in sorted(by_place.items()):
        left = Counter(first.values())
        for rank, documents in held.items():
            if not left[documents]:
                other = next(rank for rank, its in first.items() if left[its])
                theirs = _shown_lengths(manifests[other])
                return (
                    f"rank {rank}, rank {place} of its pipeline, holds other documents than ranks "
                    f"{list(first)[:SHOWN]}, which have the first stages: rank {rank} "
                    f"{_shown_lengths(manifests[rank])}, rank {other} {theirs}; submit the same "
                    "nano-batches on all ranks of a pipeline"
                )
            left[documents] -= 1
    return ""


def _held_documents(manifest: RankManifest) -> bytes:
    """Equal for ranks that hold the same. Ids of documents are each rank's own: they are left out,
    and a parent counts by its place among them."""
    columns = manifest.columns._asdict()
    ids, parents = columns.pop("document_id"), columns["document_parent"]
    if (parents != NO_PARENT).any():
        places = dict(zip(ids.tolist(), range(len(ids)), strict=True))
        columns["document_parent"] = np.array([places.get(each, each) for each in parents.tolist()])
    return b"".join(column.tobytes() for column in columns.values())


def _shown_lengths(manifest: RankManifest) -> str:
    """Describe the documents of a rank, without the end of a long list."""
    lengths: Sequence[int] = [s.length for s in chain.from_iterable(manifest.nano_batches)]
    more = f" and {len(lengths) - SHOWN} more" if len(lengths) > SHOWN else ""
    return f"segments of lengths {list(lengths[:SHOWN])}{more}"
