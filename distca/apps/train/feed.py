"""The trainer's data: what every step holds, and this rank's tensors of it."""

from __future__ import annotations

import logging
from typing import Any

from control_plane.planner.planning import PlanningOptions
from distca.apps.data.batch import TokenBatch, rank_batches
from distca.apps.data.corpus import Corpus, fingerprint
from distca.apps.data.homes import plan_step_homes
from distca.apps.data.packing import BatchShape, PackedStep, Packer
from distca.apps.data.settings import DataSettings
from distca.apps.data.sources import open_corpus
from distca.errors import DataError

logger = logging.getLogger(__name__)

_NAMED_DOCUMENTS = 5
"""How many cut documents the log names, longest first."""


class Feed:
    """Packs the user's documents, step after step.

    Args:
        settings: where the documents are and how they are cut.
        shape: sizes of a step.
        planned_homes: options of the planner, to give every token the home from which the fewest
            bytes move; None leaves documents where packing puts them.
    """

    def __init__(
        self,
        settings: DataSettings,
        shape: BatchShape,
        *,
        planned_homes: PlanningOptions | None = None,
    ) -> None:
        self._planned_homes = planned_homes
        self.corpus: Corpus = open_corpus(settings.data, settings.text_field)
        self.shape = shape
        self.max_document_tokens = min(
            settings.max_document_tokens or shape.slot_tokens, shape.slot_tokens
        )
        self._packer = Packer(
            self.corpus.lengths,
            shape,
            seed=settings.seed,
            max_document_tokens=settings.max_document_tokens,
        )
        self._log_cut_documents(settings.max_document_tokens or shape.slot_tokens)

    @property
    def identity(self) -> dict[str, Any]:
        """Everything but the seed that batches depend on, to compare with other ranks and runs."""
        return {
            "documents": fingerprint(self.corpus),
            "ranks": self.shape.n_ranks,
            "nano_batches": self.shape.n_nano_batches,
            "nano_batch_tokens": self.shape.nano_batch_tokens,
            "span_ranks": self.shape.span_ranks,
            "max_document_tokens": self.max_document_tokens,
            **({"cut_documents": True} if self.shape.cut_documents else {}),
            "homes": "packed" if self._planned_homes is None else str(self._planned_homes),
        }

    @property
    def description(self) -> str:
        """The documents, in words."""
        lengths = self.corpus.lengths
        return f"{self.corpus.source}: {len(lengths):,} documents, {int(lengths.sum()):,} tokens"

    def packed(self, step: int) -> PackedStep:
        """The documents of all ranks in ``step``.

        Raises:
            DataError: it holds nothing to predict.
        """
        packed = self._packer.pack(step)
        if packed.predicted_tokens == 0:
            raise DataError(
                f"{self.corpus.source}: all {len(packed.documents)} documents of step {step} have "
                "one token, so there is nothing to predict; give longer documents"
            )
        if self._planned_homes is not None:
            packed = plan_step_homes(packed, self._planned_homes)
        return packed

    def batches(self, packed: PackedStep, rank: int) -> list[TokenBatch]:
        """The tensors of ``rank``, one batch a nano-batch."""
        return rank_batches(packed, self.corpus, rank)

    def _log_cut_documents(self, limit: int) -> None:
        cut = self._packer.cut_documents
        if not len(cut):
            return
        lengths = self.corpus.lengths[cut]
        longest = cut[lengths.argsort(kind="stable")[::-1][:_NAMED_DOCUMENTS]]
        named = ", ".join(
            f"{self.corpus.name(int(document))} ({self.corpus.lengths[document]:,} tokens)"
            for document in longest
        )
        more = f" and {len(cut) - len(longest)} more" if len(cut) > len(longest) else ""
        logger.info("cut into pieces of at most %d tokens: %s%s", limit, named, more)
