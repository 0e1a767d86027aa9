"""The begin and end of a plan: the ticks in which each document takes part.

A plan that replaces another one in the middle of a step takes up each document where the last of
its ranks stands. In the first ticks of a lane, therefore, not all documents take part. A lane falls
into a few *stretches* of ticks in which the same documents do; every member derives them from the
same numbers.

Where the ranks of pipelines have unequally many layers, a document takes part in its rank's layers
only, the last ones of the job: the lanes of all ranks turn from forward to backward at one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from core_attention.arrays import BoolArray, Int64Array, int64_column
from core_attention.errors import PlanError
from core_attention.manifest import Manifest

_NEVER = np.iinfo(np.int64).max


class FirstTicks:
    """The first ticks of the documents of a plan, or of a slice of it.

    Args:
        manifest: of the plan.
        first_tick: ``[n_documents]`` index in the document's lane, 0 for a plan that begins with
            its step.
        rank_layers: ``[n_ranks]`` calls of core attention in one forward of each rank, if they
            differ.
    """

    def __init__(
        self,
        manifest: Manifest,
        first_tick: Int64Array | None = None,
        rank_layers: Sequence[int] | None = None,
    ) -> None:
        if first_tick is None:
            first_tick = np.zeros(manifest.n_documents, dtype=np.int64)
        self.first_tick = int64_column(first_tick, "first_tick")
        if self.first_tick.shape != (manifest.n_documents,) or (self.first_tick < 0).any():
            raise PlanError(
                f"first_tick of step {manifest.step} has {self.first_tick.size} values, the least "
                f"{self.first_tick.min(initial=0)}; there must be one, 0 or more, for each of the "
                f"{manifest.n_documents} documents"
            )
        self._nano_batch = manifest.document_nano_batch
        self._end = np.full(manifest.n_documents, _NEVER)
        if rank_layers is not None:
            n_layers, layers = max(rank_layers), np.array(rank_layers, dtype=np.int64)
            own = layers[manifest.segment_rank[manifest.first_segment[:-1]]]
            self.first_tick = np.maximum(self.first_tick, n_layers - own)
            self._end[own < n_layers] = (n_layers + own)[own < n_layers]

    @cached_property
    def _begins(self) -> dict[int, Int64Array]:
        """The begin of each stretch of a nano-batch with documents, in order."""
        found = {}
        for nano_batch in np.unique(self._nano_batch):
            here = self._nano_batch == nano_batch
            bounds = np.unique(np.concatenate([self.first_tick[here], self._end[here]]))
            found[int(nano_batch)] = bounds[bounds < _NEVER]
        return found

    def stretch(self, nano_batch: int, index: int) -> int:
        """The stretch that tick ``index`` of a lane lies in; -1 before any document takes part."""
        begins = self._begins.get(nano_batch)
        if begins is None:
            return -1
        return int(np.searchsorted(begins, index, side="right")) - 1

    def documents(self, nano_batch: int, stretch: int) -> BoolArray:
        """``[n_documents]`` whether a document takes part in the ticks of a stretch."""
        begin = self._begins[nano_batch][stretch]
        running: BoolArray = (self.first_tick <= begin) & (begin < self._end)
        taking_part: BoolArray = running & (self._nano_batch == nano_batch)
        return taking_part
