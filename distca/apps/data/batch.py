"""Tensors of a step: what a rank feeds its model, and whole documents for comparison."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from core_attention.arrays import Int64Array
from distca.apps.data.corpus import Corpus
from distca.apps.data.packing import PackedDocument, PackedStep

IGNORED_LABEL = -100
"""Marks a row that predicts nothing; cross entropy leaves it out."""


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Packed rows of documents, or one whole document.

    Attributes:
        input_ids: ``[1, n_tokens]`` int64.
        position_ids: ``[1, n_tokens]`` int64, positions in the document: 0 at its beginning, the
            segment's offset at the beginning of a segment that continues one.
        labels: ``[1, n_tokens]`` int64, the document's next token; ``IGNORED_LABEL`` at its end.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor

    def to(self, device: torch.device) -> TokenBatch:
        """The same on ``device``."""
        return TokenBatch(
            *(tensor.to(device) for tensor in (self.input_ids, self.position_ids, self.labels))
        )


def rank_batches(packed: PackedStep, corpus: Corpus, rank: int) -> list[TokenBatch]:
    """The nano-batches of ``rank``, ``[1, nano_batch_tokens]`` each."""
    return [
        _concatenate(
            [
                _segment(corpus, document, piece.offset, piece.length)
                for document in packed.documents
                for piece in document.on(rank, nano_batch)
            ]
        )
        for nano_batch in range(packed.shape.n_nano_batches)
    ]


def whole_documents(packed: PackedStep, corpus: Corpus, rank: int) -> Iterator[TokenBatch]:
    """The documents that begin on ``rank``, each as a batch of its own, whole.

    Over all ranks these are all documents of the step, once each.
    """
    for document in packed.documents:
        if document.segments[0].rank == rank:
            yield _concatenate([_segment(corpus, document, 0, document.length)])


def _segment(
    corpus: Corpus, document: PackedDocument, offset: int, length: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Input ids, positions and labels of rows ``[offset, offset + length)`` of ``document``.

    The label of a segment's last row is the first token of the next segment, which may lie on
    another rank or in another nano-batch: every rank can read every document.
    """
    end = offset + length
    with_next = min(end + 1, document.length)
    begin = document.source_begin
    tokens = corpus.tokens(document.source, begin + offset, begin + with_next).astype(np.int64)
    labels = np.full(length, IGNORED_LABEL, dtype=np.int64)
    labels[: with_next - offset - 1] = tokens[1:]
    return tokens[:length], np.arange(offset, end), labels


def _concatenate(segments: list[tuple[Int64Array, Int64Array, Int64Array]]) -> TokenBatch:
    columns = (np.concatenate(column)[None] for column in zip(*segments, strict=True))
    return TokenBatch(*(torch.from_numpy(column) for column in columns))
