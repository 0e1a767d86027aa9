"""Manifests: which rank holds which piece of which document in a step.

A *document* is one training text: attention is causal inside it and never crosses it. A *segment*
is a contiguous piece of a document that lives on one rank in one nano-batch. A *manifest* lists,
for one step, the segments of every rank and nano-batch in packed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from operator import index
from typing import NamedTuple

import numpy as np

from core_attention.arrays import Int64Array, exclusive_cumsum, frozen, group_bounds, int64_column
from core_attention.errors import ManifestError

MAX_DOCUMENT_TOKENS = 2**31 - 1
"""Kernels take 32-bit row offsets."""


@dataclass(frozen=True)
class Segment:
    """Positions ``[offset, offset + length)`` of one document.

    Attributes:
        document_id: names the document in its step, equal on every rank that holds a piece of it.
        document_length: tokens of the whole document, at least 1.
        offset: first position.
        length: tokens of the piece, at least 1.
    """

    document_id: int
    document_length: int
    offset: int
    length: int


class SegmentColumns(NamedTuple):
    """The segments of one rank, nano-batch after nano-batch in packed order: ``[n_segments]`` each,
    what :class:`Segment` says of them."""

    nano_batch: Int64Array
    document_id: Int64Array
    document_length: Int64Array
    offset: Int64Array
    length: Int64Array


class RankManifest:
    """What one rank holds in one step. Equal to another of equal values; never changed.

    Args:
        step: the training step, from 0.
        rank: the data-parallel rank, from 0.
        nano_batches: for each nano-batch, its segments in packed order (row 0 first).

    Raises:
        ManifestError: a segment has a value that is no 64-bit integer.
    """

    def __init__(self, step: int, rank: int, nano_batches: Sequence[Sequence[Segment]]) -> None:
        rows = [
            (nano, s.document_id, s.document_length, s.offset, s.length)
            for nano, segments in enumerate(nano_batches)
            for s in segments
        ]
        table = np.array(rows) if rows else np.empty((0, len(SegmentColumns._fields)), np.int64)
        if table.dtype != np.int64:
            # Of other integers, or a mistake.
            try:
                table = np.array([[index(value) for value in row] for row in rows], np.int64)
            except (OverflowError, TypeError) as error:
                raise ManifestError(
                    f"step {step}, rank {rank}: a segment has a value that is no 64-bit integer: "
                    f"{error}"
                ) from error
        self._set(step, rank, len(nano_batches), SegmentColumns(*table.T))

    @classmethod
    def from_columns(
        cls, step: int, rank: int, n_nano_batches: int, columns: SegmentColumns
    ) -> RankManifest:
        """The same from columns of integers, ordered by nano-batch."""
        manifest = cls.__new__(cls)
        manifest._set(step, rank, n_nano_batches, columns)
        return manifest

    @classmethod
    def from_lengths(
        cls, step: int, rank: int, nano_batches: Sequence[Sequence[int]]
    ) -> RankManifest:
        """Whole documents of the given lengths; ids are made unique across ranks."""
        next_id = count(rank << 32)
        return cls(
            step,
            rank,
            [
                [Segment(next(next_id), length, 0, length) for length in lengths]
                for lengths in nano_batches
            ],
        )

    def _set(self, step: int, rank: int, n_nano_batches: int, columns: SegmentColumns) -> None:
        self.step = step
        self.rank = rank
        self.n_nano_batches = n_nano_batches
        self.columns = columns

    @cached_property
    def nano_batches(self) -> tuple[tuple[Segment, ...], ...]:
        """For each nano-batch, its segments in packed order (row 0 first)."""
        packed: list[list[Segment]] = [[] for _ in range(self.n_nano_batches)]
        for nano, *segment in zip(*(column.tolist() for column in self.columns), strict=True):
            packed[nano].append(Segment(*segment))
        return tuple(tuple(segments) for segments in packed)

    @cached_property
    def fingerprint(self) -> int:
        """The hash of all its values, in this process."""
        columns = b"".join(column.tobytes() for column in self.columns)
        return hash((self.step, self.rank, self.n_nano_batches, columns))

    def __hash__(self) -> int:
        return self.fingerprint

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankManifest) and (
            (self.step, self.rank, self.n_nano_batches)
            == (other.step, other.rank, other.n_nano_batches)
            and all(map(np.array_equal, self.columns, other.columns))
        )

    def __repr__(self) -> str:
        return f"RankManifest({self.step}, {self.rank}, {self.nano_batches})"

    def tokens(self, nano_batch: int) -> int:
        """Rows of ``nano_batch`` on this rank."""
        return int(self.columns.length[self.columns.nano_batch == nano_batch].sum())


@dataclass(frozen=True, eq=False)
class Manifest:
    """The whole step: every document, and where each of its rows is at home.

    Documents are sorted by (nano-batch, id), segments by (document, offset). All columns are
    read-only int64 arrays. Build one with :meth:`merge`; the constructor checks every invariant:
    the segments of a document partition ``[0, length)`` within one nano-batch, and the rows of a
    rank's nano-batch are covered once, without gaps.

    Attributes:
        step: the training step.
        n_ranks: ranks of the job.
        n_nano_batches: nano-batches of every rank (2 with ping-pong, else 1).
        document_id, document_length, document_nano_batch: ``[n_documents]``.
        segment_document: ``[n_segments]`` index into the documents.
        segment_offset, segment_length: ``[n_segments]`` positions in the document.
        segment_rank: ``[n_segments]`` the home of the segment's rows.
        segment_row: ``[n_segments]`` its first row in the packed rows of (rank, nano-batch).
        whole: False for a slice made by :meth:`restrict`, whose ranks have gaps in their rows.
    """

    step: int
    n_ranks: int
    n_nano_batches: int
    document_id: Int64Array
    document_length: Int64Array
    document_nano_batch: Int64Array
    segment_document: Int64Array
    segment_offset: Int64Array
    segment_length: Int64Array
    segment_rank: Int64Array
    segment_row: Int64Array
    whole: bool = True
    first_segment: Int64Array = field(init=False)
    """``[n_documents + 1]``: document d owns segments ``[first_segment[d],
    first_segment[d + 1])``."""

    def __post_init__(self) -> None:
        for name in _COLUMNS:
            object.__setattr__(self, name, int64_column(getattr(self, name), name))
        self._check_sizes()
        bounds = np.searchsorted(self.segment_document, np.arange(self.n_documents + 1))
        object.__setattr__(self, "first_segment", frozen(bounds.astype(np.int64)))
        self._check_documents()
        self._check_partition()
        self._check_rows()

    @property
    def n_documents(self) -> int:
        return len(self.document_id)

    @property
    def n_segments(self) -> int:
        return len(self.segment_document)

    def tokens_per_rank(self, nano_batch: int) -> Int64Array:
        """``[n_ranks]`` rows of each rank's ``nano_batch`` that this manifest describes."""
        chosen = self.document_nano_batch[self.segment_document] == nano_batch
        counts = np.bincount(
            self.segment_rank[chosen],
            weights=self.segment_length[chosen],
            minlength=self.n_ranks,
        )
        return counts.astype(np.int64)

    @classmethod
    def merge(cls, rank_manifests: Sequence[RankManifest], n_ranks: int) -> Manifest:
        """The manifest of a step from those of all its ranks, in any order.

        Raises:
            ManifestError: a rank is missing, twice or out of range; ranks disagree on the step,
                the number of nano-batches, or a document's length or nano-batch; or an invariant
                of the class does not hold.
        """
        by_rank = _one_per_rank(rank_manifests, n_ranks)
        nano, ids, document_length, offset, length = (
            np.concatenate(columns) for columns in zip(*(m.columns for m in by_rank), strict=True)
        )
        if not len(nano):
            raise ManifestError(f"step {by_rank[0].step}: no rank holds a segment")
        rank = np.repeat(np.arange(n_ranks), [len(m.columns.length) for m in by_rank])
        row = _rows((rank, nano), length)
        order = np.lexsort((offset, ids, nano))
        nano, ids, document_length, offset, length, rank, row = (
            column[order] for column in (nano, ids, document_length, offset, length, rank, row)
        )
        first = np.ones(len(nano), dtype=bool)
        first[1:] = (nano[1:] != nano[:-1]) | (ids[1:] != ids[:-1])
        document = np.cumsum(first) - 1
        disagree = document_length != document_length[first][document]
        if disagree.any():
            at = int(np.flatnonzero(disagree)[0])
            raise ManifestError(
                f"document {ids[at]}: rank {rank[at]} gives its length as {document_length[at]}, "
                f"another segment as {document_length[first][document[at]]}; every segment must "
                "carry the length of the whole document"
            )
        return cls(
            step=by_rank[0].step,
            n_ranks=n_ranks,
            n_nano_batches=by_rank[0].n_nano_batches,
            document_id=ids[first],
            document_length=document_length[first],
            document_nano_batch=nano[first],
            segment_document=document,
            segment_offset=offset,
            segment_length=length,
            segment_rank=rank,
            segment_row=row,
        )

    def _check_sizes(self) -> None:
        if self.n_ranks < 1 or self.n_nano_batches < 1 or self.step < 0:
            raise ManifestError(
                f"step {self.step}, n_ranks {self.n_ranks}, n_nano_batches "
                f"{self.n_nano_batches}: the step must be 0 or more, the others 1 or more"
            )
        for names in (_DOCUMENT_COLUMNS, _SEGMENT_COLUMNS):
            sizes = {name: len(getattr(self, name)) for name in names}
            if len(set(sizes.values())) != 1:
                raise ManifestError(f"columns of different lengths: {sizes}")
        self._check_range("segment_document", 0, self.n_documents)
        self._check_range("segment_rank", 0, self.n_ranks)
        self._check_range("document_nano_batch", 0, self.n_nano_batches)

    def _check_range(self, name: str, begin: int, end: int) -> None:
        column = getattr(self, name)
        bad = (column < begin) | (column >= end)
        if bad.any():
            raise ManifestError(
                f"{name} holds {column[bad][0]}; valid values are {begin} to {end - 1}"
            )

    def _check_documents(self) -> None:
        bad = (self.document_length < 1) | (self.document_length > MAX_DOCUMENT_TOKENS)
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise ManifestError(
                f"document {self.document_id[at]} has length {self.document_length[at]}; a "
                f"document has 1 to {MAX_DOCUMENT_TOKENS} tokens: leave empty documents out"
            )
        bad = self.segment_length < 1
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise ManifestError(
                f"document {self._id_of(at)}: the segment at offset {self.segment_offset[at]} on "
                f"rank {self.segment_rank[at]} has length {self.segment_length[at]}; a segment "
                "has at least 1 token"
            )
        unique, counts = np.unique(self.document_id, return_counts=True)
        if (counts > 1).any():
            twice = int(unique[counts > 1][0])
            nanos = self.document_nano_batch[self.document_id == twice]
            raise ManifestError(
                f"document {twice} appears in nano-batches {nanos.tolist()}; all segments of a "
                "document belong to one nano-batch, and ids are unique in a step"
            )
        # Every member numbers documents alike, which the order of rows in messages rests on.
        in_order = np.lexsort((self.document_id, self.document_nano_batch))
        if (np.diff(in_order) < 0).any():
            raise ManifestError("documents are not sorted by nano-batch, then id")

    def _check_partition(self) -> None:
        """The segments of each document, in order, cover ``[0, length)`` once."""
        if (np.diff(self.segment_document) < 0).any():
            raise ManifestError("segments are not sorted by document")
        begin, end = self.first_segment[:-1], self.first_segment[1:]
        if (begin == end).any():
            at = int(np.flatnonzero(begin == end)[0])
            raise ManifestError(f"document {self.document_id[at]} has no segments")
        segment_end = self.segment_offset + self.segment_length
        expected = np.empty_like(segment_end)
        expected[1:] = segment_end[:-1]
        expected[begin] = 0
        wrong = np.flatnonzero(self.segment_offset != expected)
        if wrong.size:
            at = int(wrong[0])
            what = "overlaps" if self.segment_offset[at] < expected[at] else "leaves a gap after"
            raise ManifestError(
                f"document {self._id_of(at)}: the segment at offset {self.segment_offset[at]} "
                f"(length {self.segment_length[at]}, rank {self.segment_rank[at]}) {what} the "
                f"segments before it, which end at {expected[at]}; segments must partition "
                f"[0, {self._length_of(at)})"
            )
        wrong = np.flatnonzero(segment_end[end - 1] != self.document_length)
        if wrong.size:
            at = int(wrong[0])
            raise ManifestError(
                f"document {self.document_id[at]}: its segments end at "
                f"{segment_end[end[at] - 1]}, its length is {self.document_length[at]}; segments "
                "must partition [0, length): is one missing, or on a rank of another job?"
            )

    def _check_rows(self) -> None:
        """No two segments of (rank, nano-batch) share a row; a whole manifest leaves no gap."""
        nano = self.document_nano_batch[self.segment_document]
        order = np.lexsort((self.segment_row, nano, self.segment_rank))
        rank, nano, row = self.segment_rank[order], nano[order], self.segment_row[order]
        row_end = row + self.segment_length[order]
        same = (rank[1:] == rank[:-1]) & (nano[1:] == nano[:-1])
        expected = np.where(same, row_end[:-1], 0)
        wrong = (row[1:] != expected) if self.whole else (row[1:] < expected)
        wrong = np.append(
            (row[:1] != 0) if self.whole else (row[:1] < 0),
            wrong,
        )
        if wrong.any():
            at = int(order[np.flatnonzero(wrong)[0]])
            raise ManifestError(
                f"document {self._id_of(at)}: its segment at offset {self.segment_offset[at]} "
                f"begins at row {self.segment_row[at]} of rank {self.segment_rank[at]}, where "
                "another segment lies or after a gap; packed rows are covered once, from row 0"
            )

    def _id_of(self, segment: int) -> int:
        return int(self.document_id[self.segment_document[segment]])

    def _length_of(self, segment: int) -> int:
        return int(self.document_length[self.segment_document[segment]])


_DOCUMENT_COLUMNS = ("document_id", "document_length", "document_nano_batch")
_SEGMENT_COLUMNS = (
    "segment_document",
    "segment_offset",
    "segment_length",
    "segment_rank",
    "segment_row",
)
_COLUMNS = _DOCUMENT_COLUMNS + _SEGMENT_COLUMNS


def _rows(groups: tuple[Int64Array, ...], length: Int64Array) -> Int64Array:
    """The first packed row of each segment, in groups of equal keys that lie one after another."""
    bounds = group_bounds(groups)
    row = exclusive_cumsum(length)
    return row - np.repeat(row[bounds[:-1]], np.diff(bounds))


def _one_per_rank(rank_manifests: Sequence[RankManifest], n_ranks: int) -> list[RankManifest]:
    by_rank: dict[int, RankManifest] = {}
    for manifest in rank_manifests:
        if not 0 <= manifest.rank < n_ranks:
            raise ManifestError(f"rank {manifest.rank} is not one of the job's {n_ranks} ranks")
        if manifest.rank in by_rank:
            raise ManifestError(f"rank {manifest.rank} gives two manifests for one step")
        by_rank[manifest.rank] = manifest
    missing = sorted(set(range(n_ranks)) - set(by_rank))
    if missing:
        raise ManifestError(f"no manifest from ranks {missing}")
    for name, values in (
        ("step", {m.step for m in rank_manifests}),
        ("number of nano-batches", {m.n_nano_batches for m in rank_manifests}),
    ):
        if len(values) > 1:
            raise ManifestError(f"ranks disagree on the {name}: {sorted(values)}")
    return [by_rank[rank] for rank in range(n_ranks)]
