"""Packing: the place of every piece of every document in a step, a pure function of (seed, step).

The pieces of the corpus, shuffled again in every epoch, form one endless stream of tokens. Step k
takes the next ``n_nano_batches * n_ranks * nano_batch_tokens`` of them, so any step can be packed
without those before it, and all ranks agree on the documents of all ranks.

A *slot* is what must not cut a document: the rows of one rank in one nano-batch; with
``span_ranks`` those of all ranks, and with ``cut_documents`` those of both nano-batches of a pair,
the first one's first. A document that reaches a slot's end is cut there; the rest continues in the
next slot as a document of its own, with positions from 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from core_attention.arrays import Int64Array, exclusive_cumsum, runs_to_rows
from core_attention.manifest import RankManifest, Segment
from distca.contract.checks import check_least


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Sizes of a step's batch.

    Attributes:
        n_ranks: data-parallel ranks.
        n_nano_batches: nano-batches of every rank.
        nano_batch_tokens: rows of one nano-batch on one rank.
        span_ranks: whether a document may continue on the next rank.
        cut_documents: whether a document may begin in the first nano-batch of each pair and go on
            in the second: in 0 and 1, 2 and 3, ...

    Raises:
        ValueError: a number is too small, or documents may be cut and nano-batches are no pairs.
    """

    n_ranks: int
    n_nano_batches: int
    nano_batch_tokens: int
    span_ranks: bool = False
    cut_documents: bool = False

    def __post_init__(self) -> None:
        check_least(self, n_ranks=1, n_nano_batches=1, nano_batch_tokens=2)
        if self.cut_documents and self.n_nano_batches % 2:
            raise ValueError(
                f"cut_documents: a document can be cut between two nano-batches, and there are "
                f"{self.n_nano_batches}; set nano_batches to 2, or leave cut_documents out"
            )

    @property
    def slot_tokens(self) -> int:
        """Rows that a document can fill without being cut into two documents."""
        ranks = self.n_ranks if self.span_ranks else 1
        return self.nano_batch_tokens * ranks * (2 if self.cut_documents else 1)

    @property
    def step_tokens(self) -> int:
        return self.nano_batch_tokens * self.n_nano_batches * self.n_ranks


class Piece(NamedTuple):
    """A segment of a document, and where it lies."""

    nano_batch: int
    rank: int
    offset: int
    length: int


@dataclass(frozen=True)
class PackedDocument:
    """One document of a step, in the sense of a manifest.

    Attributes:
        document_id: unique in the step.
        source: index of the document in the corpus that it is taken from.
        source_begin: first token of it there.
        length: its tokens.
        segments: its pieces, in order.
    """

    document_id: int
    source: int
    source_begin: int
    length: int
    segments: tuple[Piece, ...]

    @property
    def nano_batch(self) -> int:
        """The nano-batch in which it begins."""
        return self.segments[0].nano_batch

    def on(self, rank: int, nano_batch: int) -> Iterator[Piece]:
        """Its pieces there, in order."""
        for piece in self.segments:
            if (piece.rank, piece.nano_batch) == (rank, nano_batch):
                yield piece


@dataclass(frozen=True)
class PackedStep:
    """The documents of a step, slot after slot; within a slot by their first row."""

    step: int
    shape: BatchShape
    documents: tuple[PackedDocument, ...]

    @property
    def predicted_tokens(self) -> int:
        """Tokens whose successor is predicted, over all ranks: all but each document's last."""
        return sum(document.length - 1 for document in self.documents)

    def rank_manifest(self, rank: int) -> RankManifest:
        """The documents that ``rank`` holds."""
        nano_batches = [
            [
                Segment(document.document_id, document.length, piece.offset, piece.length)
                for document in self.documents
                for piece in document.on(rank, nano_batch)
            ]
            for nano_batch in range(self.shape.n_nano_batches)
        ]
        return RankManifest(self.step, rank, nano_batches)


class Packer:
    """Packs the documents of a corpus into steps.

    Args:
        lengths: ``[n_documents]`` tokens of the corpus's documents.
        shape: sizes of a step.
        seed: of the shuffle.
        max_document_tokens: longer documents are cut into pieces of at most this many tokens;
            None for what a slot holds.
    """

    def __init__(
        self,
        lengths: Int64Array,
        shape: BatchShape,
        *,
        seed: int,
        max_document_tokens: int | None = None,
    ) -> None:
        self._shape = shape
        self._seed = seed
        limit = max_document_tokens or shape.slot_tokens
        self.cut_documents: Int64Array = np.flatnonzero(lengths > limit)
        """Indices of the documents that are cut because they are longer than the limit."""
        self._source, self._begin, self._length = _pieces(lengths, limit)
        self._epoch_tokens = int(self._length.sum())
        self._epoch_order = lru_cache(maxsize=2)(self._shuffle)

    def pack(self, step: int) -> PackedStep:
        """The documents of ``step`` and where they lie."""
        shape = self._shape
        documents: list[PackedDocument] = []
        begin = step * shape.step_tokens
        for slot in range(shape.step_tokens // shape.slot_tokens):
            row = 0
            for source, source_begin, length in self._slice(begin, shape.slot_tokens):
                segments = self._segments(slot, row, length)
                documents.append(
                    PackedDocument(len(documents), source, source_begin, length, segments)
                )
                row += length
            begin += shape.slot_tokens
        return PackedStep(step, shape, tuple(documents))

    def _segments(self, slot: int, row: int, length: int) -> tuple[Piece, ...]:
        """Cuts rows ``[row, row + length)`` of a slot at the ends of ranks' nano-batches."""
        shape = self._shape
        per_rank = shape.nano_batch_tokens
        segments, offset = [], 0
        while offset < length:
            place, rank_row = divmod(row + offset, per_rank)
            if shape.cut_documents and not shape.span_ranks:
                pair, rank = divmod(slot, shape.n_ranks)
                nano_batch = 2 * pair + place
            else:
                first = slot * (shape.slot_tokens // per_rank)
                nano_batch, rank = divmod(first + place, shape.n_ranks)
            piece = min(length - offset, per_rank - rank_row)
            segments.append(Piece(nano_batch, rank, offset, piece))
            offset += piece
        return tuple(segments)

    def _slice(self, begin: int, length: int) -> list[tuple[int, int, int]]:
        """The (source, source_begin, length) in ``[begin, begin + length)`` of the stream."""
        found = []
        end = begin + length
        while begin < end:
            epoch, at = divmod(begin, self._epoch_tokens)
            order, starts = self._epoch_order(epoch)
            index = int(np.searchsorted(starts, at, side="right")) - 1
            piece = order[index]
            skipped = at - int(starts[index])
            taken = min(int(self._length[piece]) - skipped, end - begin)
            found.append((int(self._source[piece]), int(self._begin[piece]) + skipped, taken))
            begin += taken
        return found

    def _shuffle(self, epoch: int) -> tuple[Int64Array, Int64Array]:
        """The pieces in the order of an epoch, and where each begins in it."""
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._length))
        return order, exclusive_cumsum(self._length[order])


def _pieces(lengths: Int64Array, limit: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Cuts documents into pieces of at most ``limit`` tokens: (document, begin, length) each."""
    counts = -(-lengths // limit)
    document = np.repeat(np.arange(len(lengths)), counts)
    begin = runs_to_rows(np.zeros_like(counts), counts) * limit
    return document, begin, np.minimum(limit, lengths[document] - begin)
