"""Manifests: which rank holds which piece of which document in a step.

A *document* is one training text: attention is causal inside it and never crosses it. A *segment*
is a contiguous piece of a document that lives on one rank in one nano-batch. A *manifest* lists,
for one step, the segments of every rank and nano-batch in packed order.

Nano-batches that are even in number come in pairs: 0 and 1, 2 and 3, and so on. A document may go
on from the first of a pair to the second. Each part is then a document of its nano-batch: the first
is ``[0, cut)``, and in the second the queries are ``[cut, length)``, while the keys before them are
*carried*: rows that another document owns.

So it is with documents that share a prefix. A document may have a *parent* and an offset: it begins
at that position of its parent's *path*, all positions from the root to the parent's end, and its
own rows are those from there on. The prefix is carried: the rows of the path lie once, wherever
they are, and are keys of every document that branches off behind them. A parent is in the
nano-batch of its child, or in the one before of its pair, whose ranks hand the rows in again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import index
from typing import NamedTuple

import numpy as np

from core_attention.arrays import (
    BoolArray,
    Int64Array,
    exclusive_cumsum,
    frozen,
    group_bounds,
    int64_column,
    runs_to_rows,
)
from core_attention.errors import ManifestError

MAX_DOCUMENT_TOKENS = 2**31 - 1
"""Kernels take 32-bit row offsets."""

MAX_RANK_SEGMENTS = 2**16
"""That a rank may hold in a step: others wait while they are planned and routed."""


NO_PARENT = -1
"""``document_parent`` of a document that begins at its own first token."""

OWN_ROWS = -1
"""``carried_origin`` of keys that are rows of the nano-batch itself."""


@dataclass(frozen=True)
class Segment:
    """Positions ``[offset, offset + length)`` of one document.

    Attributes:
        document_id: names the document in its step, equal on every rank that holds a piece of it.
        document_length: tokens of the whole document, at least 1; those before its offset count.
        offset: first position.
        length: tokens of the piece, at least 1.
        document_parent: the document that it branches off, or NO_PARENT.
        document_offset: the position in the parent's path where it begins.
    """

    document_id: int
    document_length: int
    offset: int
    length: int
    document_parent: int = NO_PARENT
    document_offset: int = 0


class SegmentColumns(NamedTuple):
    """The segments of one rank, nano-batch after nano-batch in packed order: ``[n_segments]`` each,
    what :class:`Segment` says of them."""

    nano_batch: Int64Array
    document_id: Int64Array
    document_length: Int64Array
    offset: Int64Array
    length: Int64Array
    document_parent: Int64Array
    document_offset: Int64Array


class RankManifest:
    """The documents of one rank in one step. Equal to another of equal values; never changed.

    Args:
        step: the training step, from 0.
        rank: the data-parallel rank, from 0.
        nano_batches: for each nano-batch, its segments in packed order (row 0 first).
    """

    def __init__(self, step: int, rank: int, nano_batches: Sequence[Sequence[Segment]]) -> None:
        values = [
            value
            for nano, segments in enumerate(nano_batches)
            for s in segments
            for value in (
                nano,
                s.document_id,
                s.document_length,
                s.offset,
                s.length,
                s.document_parent,
                s.document_offset,
            )
        ]
        table = _integers(step, rank, values).reshape(-1, len(SegmentColumns._fields))
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
        counts = np.array([len(lengths) for lengths in nano_batches], np.int64)
        length = _integers(step, rank, list(chain.from_iterable(nano_batches)))
        nano_batch = np.repeat(np.arange(len(counts)), counts)
        document_id = (rank << 32) + np.arange(len(length))
        zeros = np.zeros_like(length)
        columns = SegmentColumns(
            nano_batch, document_id, length, zeros, length, zeros + NO_PARENT, zeros
        )
        return cls.from_columns(step, rank, len(counts), columns)

    def _set(self, step: int, rank: int, n_nano_batches: int, columns: SegmentColumns) -> None:
        self.step = step
        self.rank = rank
        self.n_nano_batches = n_nano_batches
        self.columns = columns

    @cached_property
    def nano_batches(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments of each nano-batch in packed order (row 0 first)."""
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


def _integers(step: int, rank: int, values: list[int]) -> Int64Array:
    """A column of ``values``."""
    column = np.array(values)
    if column.dtype == np.int64:
        return column
    # Of other integers, or a mistake.
    try:
        return np.array([index(value) for value in values], np.int64)
    except (OverflowError, TypeError) as error:
        raise ManifestError(
            f"step {step}, rank {rank}: a segment has a value that is no 64-bit integer: {error}"
        ) from error


_NOUNS = {"segment": "segment", "carried": "carried part"}
"""The name of rows in errors."""


def _nothing() -> Int64Array:
    return frozen(np.empty(0, dtype=np.int64))


class HeldRows(NamedTuple):
    """Runs of rows of documents: ``[n]`` each.

    Attributes:
        document: index into the documents.
        offset: position of the first row in the document.
        rank: who holds them.
    """

    document: Int64Array
    offset: Int64Array
    rank: Int64Array


@dataclass(frozen=True, eq=False)
class Manifest:
    """The whole step: every document, and where each of its rows is at home.

    Documents are sorted by (nano-batch, id), segments and carried keys by (document, offset). All
    columns are read-only int64 arrays. Build one with :meth:`merge`; the constructor checks every
    invariant: the carried keys of a document partition ``[0, document_begin)``, its segments
    ``[document_begin, length)``; and the rows of a rank's nano-batch are covered once, without
    gaps: first those of segments, then those of carried keys that the nano-batch before hands over,
    which have no queries. Carried keys begin where a segment, or a run that is handed over, begins,
    and several documents may carry the same.

    Attributes:
        step: the training step.
        n_ranks: ranks of the job.
        n_nano_batches: nano-batches of every rank.
        document_id, document_length, document_nano_batch: ``[n_documents]``. The parts of a
            document that is cut between nano-batches share its id; the first one's length is the
            cut.
        segment_document: ``[n_segments]`` index into the documents.
        segment_offset, segment_length: ``[n_segments]`` positions in the document.
        segment_rank: ``[n_segments]`` the home of the segment's rows.
        segment_row: ``[n_segments]`` its first row in the packed rows of (rank, nano-batch).
        whole: False for a slice, whose ranks have gaps in their rows.
        carried_document, carried_offset, carried_length, carried_rank, carried_row:
            ``[n_carried]`` likewise, of keys that another document owns.
        carried_origin: ``[n_carried]`` their first row in the nano-batch before, if it hands them
            over; OWN_ROWS if they are rows of the nano-batch itself.
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
    carried_document: Int64Array = field(default_factory=_nothing)
    carried_offset: Int64Array = field(default_factory=_nothing)
    carried_length: Int64Array = field(default_factory=_nothing)
    carried_rank: Int64Array = field(default_factory=_nothing)
    carried_row: Int64Array = field(default_factory=_nothing)
    carried_origin: Int64Array = field(default_factory=_nothing)
    first_segment: Int64Array = field(init=False)
    """``[n_documents + 1]``: document d owns segments ``[first_segment[d],
    first_segment[d + 1])``."""
    first_carried: Int64Array = field(init=False)
    """Likewise for carried keys."""
    document_begin: Int64Array = field(init=False)
    """``[n_documents]`` position of each document's first query; 0 but for second parts and
    documents with a parent."""

    def __post_init__(self) -> None:
        for name in _COLUMNS:
            object.__setattr__(self, name, int64_column(getattr(self, name), name))
        self._check_sizes()
        documents = np.arange(self.n_documents + 1)
        for name, column in (
            ("first_segment", self.segment_document),
            ("first_carried", self.carried_document),
        ):
            bounds = np.searchsorted(column, documents)
            object.__setattr__(self, name, frozen(bounds.astype(np.int64)))
        begin = np.zeros(self.n_documents, dtype=np.int64)
        np.add.at(begin, self.carried_document, self.carried_length)
        object.__setattr__(self, "document_begin", frozen(begin))
        self._check_documents()
        self._check_partition("segment", self.document_begin, self.document_length)
        self._check_partition("carried", np.zeros_like(begin), self.document_begin)
        self._check_carried()
        self._check_rows()

    @property
    def n_documents(self) -> int:
        return len(self.document_id)

    @property
    def n_texts(self) -> int:
        """Documents, those that are cut between nano-batches counted once."""
        return self.n_documents - len(self._parts[0])

    @property
    def n_segments(self) -> int:
        return len(self.segment_document)

    @property
    def n_carried(self) -> int:
        return len(self.carried_document)

    @property
    def shares_keys(self) -> bool:
        """Returns whether some rows are keys of several documents of a nano-batch."""
        n_over = int((self.carried_origin != OWN_ROWS).sum())
        return n_over < self.n_carried or len(self._handed_over) < n_over

    @cached_property
    def held(self) -> HeldRows:
        """The ranks that take part in the ticks of each document: by its segments, then by carried
        keys."""
        if not self.n_carried:
            return HeldRows(self.segment_document, self.segment_offset, self.segment_rank)
        return HeldRows(
            np.concatenate([self.segment_document, self.carried_document]),
            np.concatenate([self.segment_offset, self.carried_offset]),
            np.concatenate([self.segment_rank, self.carried_rank]),
        )

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
        """The manifest of a step from those of all its ranks, in any order."""
        by_rank = _one_per_rank(rank_manifests, n_ranks)
        nano, ids, *of_document, offset, length = (
            np.concatenate([getattr(m.columns, name) for m in by_rank])
            for name in ("nano_batch", "document_id", *_OF_DOCUMENT, "offset", "length")
        )
        if not len(nano):
            raise ManifestError(f"step {by_rank[0].step}: no rank holds a segment")
        rank = np.repeat(np.arange(n_ranks), [len(m.columns.length) for m in by_rank])
        row = _rows((rank, nano), length)
        order = np.lexsort((offset, ids, nano))
        nano, ids, offset, length, rank, row = (
            column[order] for column in (nano, ids, offset, length, rank, row)
        )
        first = np.ones(len(nano), dtype=bool)
        first[1:] = (nano[1:] != nano[:-1]) | (ids[1:] != ids[:-1])
        document = np.cumsum(first) - 1
        n_nano_batches, texts = by_rank[0].n_nano_batches, _Texts(ids[first], nano[first])
        of_document = [column[order] for column in of_document]
        for name, column in zip(_OF_DOCUMENT, of_document, strict=True):
            _check_agreement(name, column, first, document, texts)
        length_of, parent, begin = (column[first] for column in of_document)
        runs, carried = _Runs(document, offset, length, rank, row), {}
        parts = _parts_of_cut_documents(*texts, n_nano_batches)
        last = np.searchsorted(document, parts[:, 0], side="right") - 1
        length_of[parts[:, 0]] = offset[last] + length[last]
        source = _sources(texts, parts, parent, n_nano_batches)
        _check_offsets(texts, source, parent, begin, length_of, parts[:, 1])
        begin[parts[:, 1]] = length_of[parts[:, 0]]
        if source.max() >= 0:
            own_rows = np.zeros((n_nano_batches, n_ranks), dtype=np.int64)
            np.add.at(own_rows, (nano, rank), length)
            carried = _carry(runs, _paths(runs, source, begin, texts), own_rows, texts)
        return cls(
            step=by_rank[0].step,
            n_ranks=n_ranks,
            n_nano_batches=n_nano_batches,
            document_id=ids[first],
            document_length=length_of,
            document_nano_batch=nano[first],
            segment_document=document,
            segment_offset=offset,
            segment_length=length,
            segment_rank=rank,
            segment_row=row,
            whole=True,
            **carried,
        )

    def _check_sizes(self) -> None:
        if self.n_ranks < 1 or self.n_nano_batches < 1 or self.step < 0:
            raise ManifestError(
                f"step {self.step}, n_ranks {self.n_ranks}, n_nano_batches "
                f"{self.n_nano_batches}: the step must be 0 or more, the others 1 or more"
            )
        for names in (_DOCUMENT_COLUMNS, _SEGMENT_COLUMNS, _CARRIED_COLUMNS):
            sizes = {name: len(getattr(self, name)) for name in names}
            if len(set(sizes.values())) != 1:
                raise ManifestError(f"columns of different lengths: {sizes}")
        self._check_range("segment_document", 0, self.n_documents)
        self._check_range("segment_rank", 0, self.n_ranks)
        self._check_range("carried_document", 0, self.n_documents)
        self._check_range("carried_rank", 0, self.n_ranks)
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
        for kind in ("segment", "carried"):
            runs, noun = self._runs(kind), _NOUNS[kind]
            bad = runs.length < 1
            if bad.any():
                at = int(np.flatnonzero(bad)[0])
                raise ManifestError(
                    f"document {self.document_id[runs.document[at]]}: the {noun} at offset "
                    f"{runs.offset[at]} on rank {runs.rank[at]} has length {runs.length[at]}; a "
                    f"{noun} has at least 1 token"
                )
        self._check_ids()
        # Every member numbers documents alike, which the order of rows in messages rests on.
        in_order = np.lexsort((self.document_id, self.document_nano_batch))
        if (np.diff(in_order) < 0).any():
            raise ManifestError("documents are not sorted by nano-batch, then id")

    def _check_ids(self) -> None:
        """Only the parts of a document that is cut between nano-batches share an id."""
        first, second = self._parts
        nano = self.document_nano_batch
        before = _before(nano[second], self.n_nano_batches)
        wrong = (self.document_begin[second] == 0) | (before != nano[first])
        if wrong.any():
            document = self.document_id[first[np.flatnonzero(wrong)[0]]]
            nanos = self.document_nano_batch[self.document_id == document]
            raise ManifestError(
                f"document {document} appears in nano-batches {nanos.tolist()}; only one that is "
                "cut between a pair (0 and 1, 2 and 3) may appear twice"
            )

    def _check_carried(self) -> None:
        """Checks that an earlier nano-batch, or another document, has what a document carries;
        slices may not hold it."""
        first, second = self._parts
        wrong = np.zeros(self.n_documents, dtype=np.bool_)
        wrong[second] = self.document_length[first] != self.document_begin[second]
        handed_over = self.carried_document[self.carried_origin != OWN_ROWS]
        before = _before(self.document_nano_batch[handed_over], self.n_nano_batches)
        wrong[handed_over[before < 0]] = True
        if self.whole:
            wrong[self.carried_document[~self._is_owned()]] = True
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise ManifestError(
                f"document {self.document_id[at]} carries {self.document_begin[at]} keys into "
                f"nano-batch {self.document_nano_batch[at]}, and no document there or in the one "
                "before owns them"
            )

    def _is_owned(self) -> BoolArray:
        """``[n_carried]`` whether each run is the first rows of a segment: of its own nano-batch,
        or of the one before."""
        runs, carried = self._runs("segment"), self._runs("carried")
        own = self.carried_origin == OWN_ROWS
        nano = self.document_nano_batch[carried.document]
        held = self._places(runs.rank, self.document_nano_batch[runs.document], runs.row)
        wanted = self._places(
            carried.rank,
            np.where(own, nano, _before(nano, self.n_nano_batches)),
            np.where(own, carried.row, self.carried_origin),
        )
        order = np.argsort(held)
        found = order[np.minimum(np.searchsorted(held[order], wanted), len(order) - 1)]
        return np.asarray((held[found] == wanted) & (runs.length[found] >= carried.length))

    def _places(self, rank: Int64Array, nano_batch: Int64Array, row: Int64Array) -> Int64Array:
        """One number for each packed row of the step."""
        return ((rank * self.n_nano_batches + nano_batch) << 31) + row

    @cached_property
    def _parts(self) -> tuple[Int64Array, Int64Array]:
        """Neighbouring documents of equal id, by nano-batch."""
        order = np.argsort(self.document_id, kind="stable")
        ids = self.document_id[order]
        twice = np.flatnonzero(ids[1:] == ids[:-1])
        return order[twice], order[twice + 1]

    def _check_partition(self, kind: str, begin: Int64Array, end: Int64Array) -> None:
        """The segments, or carried keys, of each document, in order, cover ``[begin, end)`` once.

        Args:
            kind: ``"segment"`` or ``"carried"``.
            begin, end: ``[n_documents]``.
        """
        document, offset, length, rank, _ = self._runs(kind)
        noun = _NOUNS[kind]
        if (np.diff(document) < 0).any():
            raise ManifestError(f"{noun}s are not sorted by document")
        first = self.first_segment if kind == "segment" else self.first_carried
        some = np.flatnonzero(first[1:] > first[:-1])
        if kind == "segment" and len(some) < self.n_documents:
            at = int(np.setdiff1d(np.arange(self.n_documents), some)[0])
            raise ManifestError(f"document {self.document_id[at]} has no segments")
        if not len(some):
            return
        run_end = offset + length
        expected = np.empty_like(run_end)
        expected[1:] = run_end[:-1]
        expected[first[some]] = begin[some]
        wrong = np.flatnonzero(offset != expected)
        if wrong.size:
            at = int(wrong[0])
            what = "overlaps" if offset[at] < expected[at] else "leaves a gap after"
            its = int(document[at])
            raise ManifestError(
                f"document {self.document_id[its]}: the {noun} at offset {offset[at]} (rank "
                f"{rank[at]}, nano-batch {self.document_nano_batch[its]}) {what} those before it, "
                f"which end at {expected[at]}; they must partition [{begin[its]}, {end[its]})"
            )
        wrong = np.flatnonzero(run_end[first[some + 1] - 1] != end[some])
        if wrong.size:
            its = int(some[wrong[0]])
            raise ManifestError(
                f"document {self.document_id[its]}: its {noun}s end at "
                f"{run_end[first[its + 1] - 1]}, its length is {end[its]}: is one missing, or on a "
                "rank of another job?"
            )

    def _check_rows(self) -> None:
        """No two segments of (rank, nano-batch) share a row; a whole manifest leaves no gap, and
        keys that are handed over come after all segments."""
        runs = self._runs("segment")
        if self.n_carried:
            handed_over = self._runs("carried").at(self._handed_over)
            runs = _Runs(*map(np.concatenate, zip(runs, handed_over, strict=True)))
        nano = self.document_nano_batch[runs.document]
        order = np.lexsort((runs.row, nano, runs.rank))
        rank, nano, row = runs.rank[order], nano[order], runs.row[order]
        row_end = row + runs.length[order]
        same = (rank[1:] == rank[:-1]) & (nano[1:] == nano[:-1])
        expected = np.where(same, row_end[:-1], 0)
        wrong = (row[1:] != expected) if self.whole else (row[1:] < expected)
        # A segment after carried keys of the same rank and nano-batch.
        is_carried = order >= self.n_segments
        wrong = wrong | (same & is_carried[:-1] & ~is_carried[1:])
        wrong = np.append(
            (row[:1] != 0) if self.whole else (row[:1] < 0),
            wrong,
        )
        if wrong.any():
            at = int(order[np.flatnonzero(wrong)[0]])
            raise ManifestError(
                f"document {self.document_id[runs.document[at]]}: its segment at offset "
                f"{runs.offset[at]} begins at row {runs.row[at]} of rank {runs.rank[at]}; packed "
                "rows are covered once, from row 0"
            )

    @cached_property
    def _handed_over(self) -> Int64Array:
        """Runs of carried keys that a nano-batch before hands over: of those that several documents
        carry, the longest."""
        its = np.flatnonzero(self.carried_origin != OWN_ROWS)
        nano = self.document_nano_batch[self.carried_document[its]]
        rank, row = self.carried_rank[its], self.carried_row[its]
        order = np.lexsort((-self.carried_length[its], row, nano, rank))
        first = group_bounds((rank[order], nano[order], row[order]))[:-1]
        return np.asarray(its[order[first]])

    def handed_over(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """(nano-batch, first row in the one before, rows) of each run of keys that nano-batches of
        ``rank`` carry over, in the order in which they lie behind their own rows."""
        mine = self._handed_over[self.carried_rank[self._handed_over] == rank]
        nano = self.document_nano_batch[self.carried_document[mine]]
        columns = (nano, self.carried_origin[mine], self.carried_length[mine])
        return zip(*(column.tolist() for column in columns), strict=True)

    def _runs(self, kind: str) -> _Runs:
        """The columns of ``"segment"`` or ``"carried"``."""
        return _Runs(*(getattr(self, f"{kind}_{name}") for name in _Runs._fields))


class _Runs(NamedTuple):
    """Segments, or runs of carried keys: ``[n]`` each."""

    document: Int64Array
    offset: Int64Array
    length: Int64Array
    rank: Int64Array
    row: Int64Array

    def at(self, index: Int64Array) -> _Runs:
        """Some of them."""
        return _Runs(*(column[index] for column in self))


_DOCUMENT_COLUMNS = ("document_id", "document_length", "document_nano_batch")
_SEGMENT_COLUMNS = tuple(f"segment_{name}" for name in _Runs._fields)
_CARRIED_COLUMNS = (*(f"carried_{name}" for name in _Runs._fields), "carried_origin")
_COLUMNS = _DOCUMENT_COLUMNS + _SEGMENT_COLUMNS + _CARRIED_COLUMNS
_OF_DOCUMENT = ("document_length", "document_parent", "document_offset")
"""Columns of segments in which those of a document agree."""


def _before(nano_batch: Int64Array, n_nano_batches: int) -> Int64Array:
    """The nano-batch before each, of its pair; -1 for the first of a pair and those of no pair."""
    is_second = (nano_batch % 2 == 1) & (n_nano_batches % 2 == 0)
    return np.where(is_second, nano_batch - 1, -1)


def _parts_of_cut_documents(
    ids: Int64Array, nano_batch: Int64Array, n_nano_batches: int
) -> Int64Array:
    """``[n, 2]`` indices of the documents of two nano-batches of a pair that share an id."""
    # Documents are sorted by nano-batch.
    order = np.argsort(ids, kind="stable")
    ids, nano_batch = ids[order], nano_batch[order]
    before = _before(nano_batch[1:], n_nano_batches)
    same = (ids[1:] == ids[:-1]) & (before == nano_batch[:-1])
    parts = np.stack([order[:-1][same], order[1:][same]], axis=1)
    return parts[np.argsort(parts[:, 0])]


class _Texts(NamedTuple):
    """Documents, sorted by nano-batch and id: ``[n_documents]`` each."""

    document_id: Int64Array
    nano_batch: Int64Array


def _check_agreement(
    name: str, column: Int64Array, first: BoolArray, document: Int64Array, texts: _Texts
) -> None:
    """The segments of each document agree on ``column``; ``first``: the first one of each."""
    disagree = column != column[first][document]
    if disagree.any():
        at = int(np.flatnonzero(disagree)[0])
        raise ManifestError(
            f"document {texts.document_id[document[at]]}: {name} is {column[at]} in one segment "
            f"and {column[first][document[at]]} in another; every segment carries that of the "
            "whole document"
        )


def _sources(
    texts: _Texts, parts: Int64Array, parent: Int64Array, n_nano_batches: int
) -> Int64Array:
    """``[n_documents]`` the document whose path begins each one's: the first part of one that is
    cut, or the parent, in the same nano-batch if it has rows there; -1 for none."""
    source = np.full(len(parent), -1, dtype=np.int64)
    branches = np.flatnonzero(parent != NO_PARENT)
    if len(branches):
        held = zip(texts.nano_batch.tolist(), texts.document_id.tolist(), strict=True)
        places = {place: at for at, place in enumerate(held)}
        before = _before(texts.nano_batch, n_nano_batches)
        for at in branches.tolist():
            ways = ((int(nano[at]), int(parent[at])) for nano in (texts.nano_batch, before))
            source[at] = next((places[way] for way in ways if way in places), -1)
    source[parts[:, 1]] = parts[:, 0]
    lost = branches[source[branches] < 0]
    if len(lost):
        at = int(lost[0])
        raise ManifestError(
            f"document {texts.document_id[at]}: document_parent is {parent[at]}, which has no rows "
            f"in nano-batch {texts.nano_batch[at]} nor in the one before of its pair"
        )
    return source


def _check_offsets(
    texts: _Texts,
    source: Int64Array,
    parent: Int64Array,
    begin: Int64Array,
    length: Int64Array,
    second_parts: Int64Array,
) -> None:
    """Documents begin inside their parents' paths, and have rows of their own; second parts go on
    where the first ones end."""
    most = np.where(parent == NO_PARENT, 0, np.minimum(length[source], length - 1))
    wrong = (begin < 0) | (begin > most)
    wrong[second_parts] = False
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise ManifestError(
            f"document {texts.document_id[at]}: document_offset is {begin[at]} of parent "
            f"{parent[at]}; valid are 0 to {most[at]}, which leaves a row of its own"
        )


def _paths(runs: _Runs, source: Int64Array, begin: Int64Array, texts: _Texts) -> _Paths:
    """The path of each document up to its first query, root first."""
    depth = _depths(source, texts)
    segment = np.arange(len(runs.document))
    at_root = depth[runs.document] == 0
    above = _Paths(runs.document[at_root], segment[at_root], runs.length[at_root])
    found = []
    for level in range(1, int(depth.max()) + 1):
        its = np.flatnonzero(depth == level)
        first = np.searchsorted(above.document, source[its])
        end = np.searchsorted(above.document, source[its], "right")
        chosen, document = runs_to_rows(first, end - first), np.repeat(its, end - first)
        its_segment = above.segment[chosen]
        left = begin[document] - runs.offset[its_segment]
        path = _Paths(document, its_segment, np.minimum(above.length[chosen], left))
        path = path.at(np.flatnonzero(left > 0))
        found.append(path)
        own = depth[runs.document] == level
        rows = _Paths(runs.document[own], segment[own], runs.length[own])
        both = _Paths(*map(np.concatenate, zip(path, rows, strict=True)))
        above = both.at(np.argsort(both.document, kind="stable"))
    whole = _Paths(*map(np.concatenate, zip(*found, strict=True)))
    return whole.at(np.argsort(whole.document, kind="stable"))


class _Paths(NamedTuple):
    """Keys before the first queries of documents: ``[n]`` each, by document and position.

    Attributes:
        document: that carries them.
        segment: of whose rows they are the first.
        length: how many.
    """

    document: Int64Array
    segment: Int64Array
    length: Int64Array

    def at(self, index: Int64Array) -> _Paths:
        """Some of them."""
        return _Paths(*(column[index] for column in self))


def _depths(source: Int64Array, texts: _Texts) -> Int64Array:
    """``[n_documents]`` documents above each one, up to its root."""
    depth = np.zeros(len(source), dtype=np.int64)
    its = np.flatnonzero(source >= 0)
    above = source[its]
    while len(its):
        depth[its] += 1
        if depth[its[0]] > len(source):
            raise ManifestError(
                f"document {texts.document_id[its[0]]}: document_parent leads back to where it "
                "began; a tree has a root"
            )
        goes_on = source[above] >= 0
        its, above = its[goes_on], source[above[goes_on]]
    return depth


def _carry(
    runs: _Runs, paths: _Paths, own_rows: Int64Array, texts: _Texts
) -> dict[str, Int64Array]:
    """The columns of carried keys.

    Args:
        runs: all segments.
        paths: what documents carry of them.
        own_rows: ``[n_nano_batches, n_ranks]`` rows of each nano-batch.
        texts: all documents.
    """
    document, segment, length = paths
    rank, row, nano = runs.rank[segment], runs.row[segment].copy(), texts.nano_batch[document]
    over = np.flatnonzero(texts.nano_batch[runs.document[segment]] != nano)
    idle = own_rows[nano[over], rank[over]] == 0
    if idle.any():
        at = int(over[np.flatnonzero(idle)[0]])
        where = f"nano-batch {nano[at]}"
        raise ManifestError(
            f"document {texts.document_id[document[at]]} goes on in {where}, and rank {rank[at]} "
            f"has no rows in {where}: give it some, or keep the document in one nano-batch"
        )
    origin = np.full(len(row), OWN_ROWS, dtype=np.int64)
    origin[over] = row[over]
    # Each segment once however many carry it, by the first that does, behind the rank's own rows.
    _, first, which = np.unique(segment[over], return_index=True, return_inverse=True)
    rows = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(rows, which, length[over])
    rank_of, nano_of, place = rank[over[first]], nano[over[first]], np.empty_like(rows)
    order = np.lexsort((first, nano_of, rank_of))
    place[order] = _rows((rank_of[order], nano_of[order]), rows[order])
    row[over] = (place + own_rows[nano_of, rank_of])[which]
    columns = _Runs(document, runs.offset[segment], length, rank, row)
    named = {f"carried_{name}": column for name, column in columns._asdict().items()}
    return named | {"carried_origin": origin}


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
