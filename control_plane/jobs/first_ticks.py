"""The tick at which a plan that replaces another takes up each document; docs/fault_tolerance.md
says why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from core_attention.arrays import Int64Array
from core_attention.errors import PlanError
from core_attention.manifest import Manifest


def first_ticks(
    manifest: Manifest, complete_ticks: Sequence[Sequence[int]], left: Mapping[int, str]
) -> Int64Array:
    """``[n_documents]``: of the ranks that hold rows of a document, or carry its keys over from an
    earlier nano-batch, the least number of complete ticks in its lane.

    Args:
        manifest: of the whole step.
        complete_ticks: by rank, then nano-batch; of a rank in ``left``, all ticks of a lane.
        left: the ranks that have left the job or given the step up, and which, in words.
    """
    complete = np.array(complete_ticks, dtype=np.int64)
    held = manifest.held
    of_run = complete[held.rank, manifest.document_nano_batch[held.document]]
    first = np.full(manifest.n_documents, np.iinfo(np.int64).max)
    np.minimum.at(first, held.document, of_run)
    short = np.isin(held.rank, list(left))
    short &= of_run > first[held.document]
    if short.any():
        at = int(np.flatnonzero(short)[0])
        rank = int(held.rank[at])
        raise PlanError(
            f"rank {rank}'s rows of document "
            f"{manifest.document_id[held.document[at]]} are needed to run step "
            f"{manifest.step}, and rank {rank} {left[rank]}"
        )
    return first
