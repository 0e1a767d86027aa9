"""The rules for a tensor-parallel group of a job."""

from __future__ import annotations

from collections.abc import Sequence


def group_fault(rank: int, group: Sequence[int], n_ranks: int) -> str:
    """Describes the fault in the group that a rank gives; empty if it has none.

    Args:
        rank: of the job.
        group: the ranks of its group in the order of their tensor-parallel indices; empty: none.
        n_ranks: of the job.
    """
    in_range = all(0 <= member < n_ranks for member in group)
    if not group or (rank in group and len(set(group)) == len(group) and in_range):
        return ""
    return (
        "it must name the ranks of this rank's tensor-parallel group, itself among them, once "
        f"each, out of 0 to {n_ranks - 1}"
    )
