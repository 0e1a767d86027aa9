"""What a layer of a window or of chunks computes at home: tasks over a rank's own rows.

Such layers are not worth serving, since their work grows with the tokens alone. They need no rows
of other ranks either, unless a document is cut between ranks inside a window or a chunk: that is
refused by name. Where the rows before a cut are the rank's own, in nano-batch 0 or elsewhere in the
nano-batch, the first queries behind the cut have *edge keys*: a copy of the keys before it that
they see, followed by a copy of those beside them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from core_attention.arrays import Int64Array
from core_attention.kernels.protocol import TaskBatch
from trainer_client.errors import SessionError
from trainer_client.step.running_step import RunningStep


@dataclass(frozen=True)
class LayerKind:
    """Which keys a layer's queries see, besides that none is later than the query.

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
        """Whether queries see all that was before them: such layers are served."""
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


class KeyRun(NamedTuple):
    """Neighbouring rows of keys of this rank.

    Attributes:
        row: the first one's packed row.
        length: rows.
        is_handed_over: whether they are rows of nano-batch 0, which nano-batch 1 needs.
    """

    row: int
    length: int
    is_handed_over: bool


@dataclass(frozen=True, eq=False)
class HomeTasks:
    """What one nano-batch computes in layers of one kind. The tasks cover its queries.

    Attributes:
        tasks: those whose keys lie together among the nano-batch's own.
        edge_tasks: those behind a cut, whose keys are edge keys.
        edge_keys: what the edge keys are copies of, in order.
        handed_over: (first packed row, rows) of nano-batch 0 of what it hands over to nano-batch 1,
            in the order of the edge keys there; the same in both nano-batches.
    """

    tasks: TaskBatch
    edge_tasks: TaskBatch
    edge_keys: tuple[KeyRun, ...]
    handed_over: tuple[tuple[int, int], ...]


def home_tasks(running: RunningStep, nano_batch: int, kind: LayerKind) -> HomeTasks:
    """The tasks of one nano-batch under ``kind``; the same object in every layer of a step.

    Raises:
        SessionError: a document that has rows here is cut between ranks where a query needs keys
            before the cut; every rank with rows of it raises that.
    """
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


_of_steps: WeakKeyDictionary[RunningStep, dict[tuple[int, LayerKind], HomeTasks]] = (
    WeakKeyDictionary()
)


def _derive(running: RunningStep, nano_batch: int, kind: LayerKind) -> HomeTasks:
    tasks: list[_Task] = []
    edge_tasks: list[_Task] = []
    edge_keys: list[KeyRun] = []
    n_edge_keys = 0
    for document in _documents(running, nano_batch):
        for piece in document.pieces:
            n_edge = 0
            first = kind.first_key(piece.offset)
            if first < piece.offset:
                n_edge = min(kind.first_beyond(piece.offset) - piece.offset, piece.length)
                before = document.keys(piece.rank, first, piece.offset)
                if before is None:
                    raise _refusal(running, nano_batch, document, piece, kind)
                if piece.rank == running.rank:
                    n_keys = piece.offset - first + n_edge
                    edge_keys += [*before, KeyRun(piece.row, n_edge, False)]
                    edge_tasks.append(
                        _Task(piece.row, piece.row + n_edge, n_edge_keys, n_edge_keys + n_keys)
                    )
                    n_edge_keys += n_keys
            if piece.rank == running.rank:
                tasks += _tasks(piece, n_edge, kind)
    handed_over = tuple((run.row, run.length) for run in edge_keys if run.is_handed_over)
    if nano_batch == 0 and running.carried:
        handed_over = home_tasks(running, 1, kind).handed_over
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


def _tasks(piece: _Piece, n_edge: int, kind: LayerKind) -> Iterator[_Task]:
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


class _Piece(NamedTuple):
    """Neighbouring rows of a document on one rank.

    Attributes:
        offset: the first one's position in the document.
        length: rows.
        rank: who has them.
        row: the first one's packed row there.
        is_carried: whether they are keys of nano-batch 0, and the row is one of nano-batch 0, known
            of this rank alone.
    """

    offset: int
    length: int
    rank: int
    row: int
    is_carried: bool = False


@dataclass(frozen=True)
class _Document:
    """A document, or the part of it in one nano-batch.

    Attributes:
        document_id: its id.
        pieces: its rows in the nano-batch, by position.
        carried: its rows in nano-batch 0, for one that goes on in nano-batch 1.
    """

    document_id: int
    pieces: Sequence[_Piece]
    carried: Sequence[_Piece]

    def keys(self, rank: int, begin: int, end: int) -> list[KeyRun] | None:
        """Where ``rank`` has the keys at ``[begin, end)``; None if it does not have them all."""
        runs = []
        for piece in (*self.carried, *self.pieces):
            low, high = max(begin, piece.offset), min(end, piece.offset + piece.length)
            if low < high:
                if piece.rank != rank:
                    return None
                runs.append(KeyRun(piece.row + low - piece.offset, high - low, piece.is_carried))
        return runs


def _documents(running: RunningStep, nano_batch: int) -> Iterator[_Document]:
    """Those that have queries of this rank in ``nano_batch``, or keys that it carries over."""
    manifest = running.plan.manifest
    held = manifest.held
    mine = np.unique(held.document[held.rank == running.rank])
    carried = np.flatnonzero(manifest.carried_rank == running.rank)
    carried = carried[np.argsort(manifest.carried_row[carried])]
    row_in_first = np.full(manifest.n_carried, -1, dtype=np.int64)
    row_in_first[carried] = [row for row, _ in running.carried]
    segments = _pieces(
        manifest.segment_offset,
        manifest.segment_length,
        manifest.segment_rank,
        manifest.segment_row,
    )
    first_segment = manifest.first_segment.tolist()
    carried_pieces = [
        piece._replace(is_carried=True)
        for piece in _pieces(
            manifest.carried_offset, manifest.carried_length, manifest.carried_rank, row_in_first
        )
    ]
    first_carried = manifest.first_carried.tolist()
    for document in mine[manifest.document_nano_batch[mine] == nano_batch].tolist():
        yield _Document(
            int(manifest.document_id[document]),
            _joined(segments[first_segment[document] : first_segment[document + 1]]),
            carried_pieces[first_carried[document] : first_carried[document + 1]],
        )


def _pieces(*columns: Int64Array) -> list[_Piece]:
    """By the columns of their fields."""
    return [_Piece(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _joined(segments: Sequence[_Piece]) -> list[_Piece]:
    """Segments by position; those that follow one another in the document and in packed rows are
    one piece."""
    pieces: list[_Piece] = []
    for piece in segments:
        last = pieces[-1] if pieces else None
        if last is not None and last.rank == piece.rank and last.row + last.length == piece.row:
            pieces[-1] = last._replace(length=last.length + piece.length)
        else:
            pieces.append(piece)
    return pieces


def _refusal(
    running: RunningStep, nano_batch: int, document: _Document, piece: _Piece, kind: LayerKind
) -> SessionError:
    reach = f"a window of {kind.window}" if kind.window else f"chunks of {kind.chunk}"
    return SessionError(
        f"step {running.step} nano-batch {nano_batch}: a layer with {reach} tokens needs keys of "
        f"document {document.document_id} from another rank, which this release does not fetch: "
        f"rank {piece.rank} has its tokens {piece.offset} to {piece.offset + piece.length} here, "
        f"whose first needs those from {kind.first_key(piece.offset)} on. Keep documents whole on "
        "a rank" + (f", or cut them at multiples of {kind.chunk} tokens" if kind.chunk else "")
    )
