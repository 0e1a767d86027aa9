"""Tensor-parallel groups of a job: ranks with the same documents, each with a share of the heads.

Core attention treats them as any ranks: heads are independent, so what one rank's heads need says
nothing of another's. Only the model ties them together, by collectives in every layer. If they held
different documents, these would add up what does not belong together, or never meet.
"""

from __future__ import annotations

from collections.abc import Mapping

from control_plane.errors import InvalidRequestError, RefusedError
from control_plane.jobs.held_documents import held_documents, shown_lengths
from core_attention.manifest import RankManifest
from distca.contract.rpc_errors import Reason
from distca.contract.tensor_parallel import group_fault

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
            if first is not manifest and held_documents(first) != held_documents(manifest):
                ranks = list(self._of_rank[rank])
                return (
                    f"ranks {first.rank} and {rank} are of one tensor-parallel group, {ranks}, and "
                    f"hold different documents: rank {first.rank} {shown_lengths(first)}, rank "
                    f"{rank} {shown_lengths(manifest)}; give all ranks of a group the same batches"
                )
        return ""
