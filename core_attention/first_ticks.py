"""Where a plan begins: the first tick of each document that runs under it.

A plan that replaces another one in the middle of a step takes up each document where the last of
its ranks stands. In the first ticks of a lane, therefore, not all documents take part. A lane falls
into a few *stretches* of ticks in which the same documents do; every member derives them from the
same numbers.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from core_attention.arrays import BoolArray, Int64Array, int64_column
from core_attention.errors import PlanError
from core_attention.manifest import Manifest


class FirstTicks:
    """The first ticks of the documents of a plan, or of a slice of it.

    Args:
        manifest: of the plan.
        first_tick: ``[n_documents]`` index in the document's lane, 0 for a plan that begins with
            its step.

    Raises:
        PlanError: there is not one number per document, or one is negative.
    """

    def __init__(self, manifest: Manifest, first_tick: Int64Array | None = None) -> None:
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

    @cached_property
    def _begins(self) -> dict[int, Int64Array]:
        """By nano-batch with documents: where each of its stretches begins, in order."""
        return {
            int(nano_batch): np.unique(self.first_tick[self._nano_batch == nano_batch])
            for nano_batch in np.unique(self._nano_batch)
        }

    def stretch(self, nano_batch: int, index: int) -> int:
        """The stretch that tick ``index`` of a lane lies in; -1 if no document takes part."""
        begins = self._begins.get(nano_batch)
        if begins is None:
            return -1
        return int(np.searchsorted(begins, index, side="right")) - 1

    def documents(self, nano_batch: int, stretch: int) -> BoolArray:
        """``[n_documents]`` whether a document takes part in the ticks of a stretch."""
        begun: BoolArray = self.first_tick <= self._begins[nano_batch][stretch]
        taking_part: BoolArray = begun & (self._nano_batch == nano_batch)
        return taking_part
