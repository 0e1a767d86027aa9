"""The work of a layer with a window or chunks at home: tasks over a rank's own rows.

Such layers are not worth serving, since their work grows with the tokens alone. Where a document
is cut inside a window or a chunk, the first queries behind the cut have *edge keys*: a copy of the
keys before it that they see, elsewhere in the nano-batch or in the one before, followed by a copy
of those beside them. Of a document that is cut there between ranks, servers compute such layers, as
they do full ones: ``SessionOptions.windows``.
"""

from __future__ import annotations

import bisect
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from core_attention.arrays import BoolArray, Int64Array
from core_attention.errors import ManifestError
from core_attention.kernels.protocol import TaskBatch
from core_attention.manifest import OWN_ROWS
from trainer_client.step.running_step import RunningStep


@dataclass(frozen=True)
class LayerKind:
    """The keys that a layer's queries see, besides that none is later than the query.

    Attributes:
        window: how many at most, the query's own among them; None: all of the document.
        chunk: documents are cut into chunks of so many tokens, and queries see their own chunk;
            None: they are not.
    """

    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name in ("window", "chunk"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(
                    f"{name} is {value!r}; it must be an integer of 1 or more, or None"
                )
        if self.window is not None and self.chunk is not None:
            raise ValueError(
                f"window is {self.window} and chunk {self.chunk}; a layer has one of them"
            )

    @property
    def reach(self) -> int | None:
        """Tokens of a window or a chunk; None for a full layer."""
        return self.window or self.chunk

    @property
    def is_full(self) -> bool:
        """Return whether queries see all that was before them: such layers are served."""
        return self.reach is None

    def first_key(self, position: int) -> int:
        """The position of the first key that the query at ``position`` sees."""
        if self.window is not None:
            return max(position - self.window + 1, 0)
        return 0 if self.chunk is None else position - position % self.chunk

    def first_beyond(self, cut: int) -> int:
        """The first position from ``cut`` on whose query sees no key before ``cut``."""
        if self.window is not None:
            return cut + self.window - 1
        return sys.maxsize if self.chunk is None else -(-cut // self.chunk) * self.chunk

    def __str__(self) -> str:
        if self.is_full:
            return "full"
        return f"window {self.window}" if self.window else f"chunks of {self.chunk}"


FULL = LayerKind()


class RowPiece(NamedTuple):
    """Neighbouring rows of a document on one rank.

    Attributes:
        offset: the first one's position in the document.
        length: rows.
        rank: who has them.
        row: the first one's packed row there.
        is_carried: whether they are keys of the nano-batch before, and the row is one there.
    """

    offset: int
    length: int
    rank: int
    row: int
    is_carried: bool = False


@dataclass(frozen=True, eq=False)
class HomeTasks:
    """The work of one nano-batch in layers of one kind. The tasks cover its queries.

    Attributes:
        tasks: those whose keys lie together among the nano-batch's own.
        edge_tasks: those behind a cut, whose keys are edge keys.
        edge_keys: what the edge keys are copies of, in order.
        handed_over: (first packed row, rows) in the first nano-batch of a pair of what it hands
            over to the second, in the order of the edge keys there; the same in both.
    """

    tasks: TaskBatch
    edge_tasks: TaskBatch
    edge_keys: tuple[RowPiece, ...]
    handed_over: tuple[tuple[int, int], ...]


def home_tasks(running: RunningStep, nano_batch: int, kind: LayerKind) -> HomeTasks:
    """The tasks of one nano-batch under ``kind``; the same object in every layer of a step."""
    of_step = _of_steps.setdefault(running, {})
    key = (nano_batch, kind)
    if key not in of_step:
        of_step[key] = _derive(running, nano_batch, kind)
    return of_step[key]


def tasks_of_documents(bounds: Sequence[int]) -> HomeTasks:
    """The tasks of rows that are whole documents, which no step has planned.

    Args:
        bounds: ``[documents + 1]``: document d is rows ``[bounds[d], bounds[d + 1])``, or none.
    """
    tasks = [_Task(*rows, *rows) for rows in itertools.pairwise(bounds) if rows[0] < rows[1]]
    return HomeTasks(_batch(tasks), _batch([]), (), ())


def whole_documents(running: RunningStep, nano_batch: int) -> TaskBatch | None:
    """The documents of a nano-batch, if each lies whole in neighbouring rows of this rank; the same
    object in every layer of a step."""
    tasks = home_tasks(running, nano_batch, FULL)
    return None if len(tasks.edge_tasks) else tasks.tasks


_of_steps: WeakKeyDictionary[RunningStep, dict[tuple[int, LayerKind], HomeTasks]] = (
    WeakKeyDictionary()
)


def _derive(running: RunningStep, nano_batch: int, kind: LayerKind) -> HomeTasks:
    tasks: list[_Task] = []
    edge_tasks: list[_Task] = []
    edge_keys: list[RowPiece] = []
    n_keys = 0
    for document in _documents(running, nano_batch):
        for piece in document.pieces:
            before = document.keys(kind.first_key(piece.offset), piece.offset)
            ranks = {each.rank for each in (piece, *before)}
            if running.rank not in ranks:
                continue
            if len(ranks) > 1:
                raise ManifestError(
                    f"document {document.document_id} is cut between ranks at {piece.offset}, "
                    f"inside {kind}; attach with serve_windows=True, or cut it elsewhere"
                )
            n_edge = 0
            if before:
                n_edge = min(kind.first_beyond(piece.offset) - piece.offset, piece.length)
                begin = n_keys
                edge_keys += [*before, piece._replace(length=n_edge)]
                n_keys += sum(each.length for each in before) + n_edge
                edge_tasks.append(_Task(piece.row, piece.row + n_edge, begin, n_keys))
            tasks += _tasks(piece, n_edge, kind)
    handed_over = tuple((run.row, run.length) for run in edge_keys if run.is_carried)
    if running.carried(nano_batch + 1):
        handed_over = home_tasks(running, nano_batch + 1, kind).handed_over
    return HomeTasks(_batch(tasks), _batch(edge_tasks), tuple(edge_keys), handed_over)


class _Task(NamedTuple):
    q_begin: int
    q_end: int
    k_begin: int
    k_end: int


def _batch(tasks: Sequence[_Task]) -> TaskBatch:
    columns = np.array(sorted(tasks), dtype=np.int64).reshape(-1, 4).T.copy()
    q_begin, q_end, k_begin, k_end = columns
    return TaskBatch(q_begin, q_end, k_begin, k_end, dk_begin=k_begin)


def _tasks(piece: RowPiece, n_edge: int, kind: LayerKind) -> Iterator[_Task]:
    """The tasks of a piece without its first ``n_edge`` queries. Chunks are counted from the
    document's first token."""
    begin, end = piece.row + n_edge, piece.row + piece.length
    while begin < end:
        if kind.chunk is None:
            yield _Task(begin, end, piece.row, end)
            return
        rest = kind.chunk - (piece.offset + begin - piece.row) % kind.chunk
        yield _Task(begin, min(begin + rest, end), begin, min(begin + rest, end))
        begin += rest


@dataclass(frozen=True)
class _Document:
    """A document, or the part of it in one nano-batch.

    Attributes:
        document_id: its id.
        pieces: its rows in the nano-batch, by position.
        carried: its rows before these, which other documents own.
    """

    document_id: int
    pieces: Sequence[RowPiece]
    carried: Sequence[RowPiece]

    def keys(self, begin: int, end: int) -> list[RowPiece]:
        """The holders of the keys at ``[begin, end)``, and where, by position."""
        pieces, found = self._by_position, []
        at = bisect.bisect_right(pieces, begin, key=lambda piece: piece.offset) - 1
        while at < len(pieces) and pieces[at].offset < end:
            piece = pieces[at]
            low, high = max(begin, piece.offset), min(end, piece.offset + piece.length)
            row = piece.row + low - piece.offset
            found.append(piece._replace(offset=low, length=high - low, row=row))
            at += 1
        return found

    @cached_property
    def _by_position(self) -> list[RowPiece]:
        """A document over a thousand ranks has as many pieces, and each needs those before it."""
        return sorted((*self.carried, *self.pieces))


def _documents(running: RunningStep, nano_batch: int) -> Iterator[_Document]:
    """Those that have queries of this rank in ``nano_batch``, or keys that it carries over."""
    manifest = running.plan.manifest
    held = manifest.held
    mine = np.unique(held.document[held.rank == running.rank])
    is_handed_over = manifest.carried_origin != OWN_ROWS
    row = np.where(is_handed_over, manifest.carried_origin, manifest.carried_row)
    segments = _pieces(
        manifest.segment_offset,
        manifest.segment_length,
        manifest.segment_rank,
        manifest.segment_row,
    )
    first_segment = manifest.first_segment.tolist()
    carried = _pieces(
        manifest.carried_offset, manifest.carried_length, manifest.carried_rank, row, is_handed_over
    )
    first_carried = manifest.first_carried.tolist()
    for document in mine[manifest.document_nano_batch[mine] == nano_batch].tolist():
        yield _Document(
            int(manifest.document_id[document]),
            _joined(segments[first_segment[document] : first_segment[document + 1]]),
            carried[first_carried[document] : first_carried[document + 1]],
        )


def _pieces(*columns: Int64Array | BoolArray) -> list[RowPiece]:
    """Pieces from the columns of their fields."""
    return [RowPiece(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _joined(segments: Sequence[RowPiece]) -> list[RowPiece]:
    """Segments by position; those that follow one another in the document and in packed rows are
    one piece."""
    pieces: list[RowPiece] = []
    for piece in segments:
        last = pieces[-1] if pieces else None
        if last is not None and last.rank == piece.rank and last.row + last.length == piece.row:
            pieces[-1] = last._replace(length=last.length + piece.length)
        else:
            pieces.append(piece)
    return pieces
