"""What a layer of a window or of chunks computes at home: tasks over a rank's own rows.

Such layers are not worth serving, since their work grows with the tokens alone. They need no rows
of other ranks either, unless a document is cut between ranks inside a window or a chunk: that is
refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

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

    def __str__(self) -> str:
        if self.is_full:
            return "full"
        return f"window {self.window}" if self.window else f"chunks of {self.chunk}"


FULL = LayerKind()


@dataclass(frozen=True)
class Piece:
    """Neighbouring rows of a document on one rank.

    Attributes:
        row: the first one's packed row.
        offset: its position in the document.
        length: rows.
        document_length: tokens of the document.
        document_id: of the document.
    """

    row: int
    offset: int
    length: int
    document_length: int
    document_id: int


def home_tasks(running: RunningStep, nano_batch: int, kind: LayerKind) -> TaskBatch:
    """The tasks of one nano-batch under ``kind``; the same object in every layer of a step.

    Raises:
        SessionError: a document is cut between ranks where a query needs keys before the cut.
    """
    of_step = _of_steps.setdefault(running, {})
    key = (nano_batch, kind)
    if key not in of_step:
        of_step[key] = _tasks(
            f"step {running.step} nano-batch {nano_batch}", pieces_of(running, nano_batch), kind
        )
    return of_step[key]


_of_steps: WeakKeyDictionary[RunningStep, dict[tuple[int, LayerKind], TaskBatch]] = (
    WeakKeyDictionary()
)


def pieces_of(running: RunningStep, nano_batch: int) -> list[Piece]:
    """The rank's rows in ``nano_batch``, by row; segments that follow one another are one piece."""
    manifest = running.plan.manifest
    mine = manifest.segment_rank == running.rank
    mine &= manifest.document_nano_batch[manifest.segment_document] == nano_batch
    segments = np.flatnonzero(mine)
    pieces: list[Piece] = []
    for segment in segments[np.argsort(manifest.segment_row[segments], kind="stable")].tolist():
        document = int(manifest.segment_document[segment])
        piece = Piece(
            row=int(manifest.segment_row[segment]),
            offset=int(manifest.segment_offset[segment]),
            length=int(manifest.segment_length[segment]),
            document_length=int(manifest.document_length[document]),
            document_id=int(manifest.document_id[document]),
        )
        last = pieces[-1] if pieces else None
        if (
            last is not None
            and last.document_id == piece.document_id
            and last.offset + last.length == piece.offset
        ):
            pieces[-1] = Piece(
                last.row,
                last.offset,
                last.length + piece.length,
                last.document_length,
                last.document_id,
            )
        else:
            pieces.append(piece)
    return pieces


def _tasks(where: str, pieces: list[Piece], kind: LayerKind) -> TaskBatch:
    ranges = []
    for piece in pieces:
        _refuse_cut(where, piece, kind)
        ranges += list(_chunks(piece, kind.chunk))
    begin, end = np.array(ranges, dtype=np.int64).reshape(-1, 2).T.copy()
    return TaskBatch(q_begin=begin, q_end=end, k_begin=begin, k_end=end, dk_begin=begin)


def _chunks(piece: Piece, chunk: int | None) -> Iterator[tuple[int, int]]:
    """Packed rows of each chunk, which are counted from the document's first token."""
    begin, end = piece.row, piece.row + piece.length
    while begin < end:
        rest = end - begin if chunk is None else chunk - (piece.offset + begin - piece.row) % chunk
        yield begin, min(begin + rest, end)
        begin += rest


def _refuse_cut(where: str, piece: Piece, kind: LayerKind) -> None:
    cuts = {piece.offset, piece.offset + piece.length} - {0, piece.document_length}
    if kind.window == 1 or (kind.chunk is not None and not any(cut % kind.chunk for cut in cuts)):
        return
    if cuts:
        reach = f"a window of {kind.window}" if kind.window else f"chunks of {kind.chunk}"
        raise SessionError(
            f"{where}: a layer with {reach} tokens needs keys of document {piece.document_id} from "
            f"another rank or nano-batch, which this release does not fetch: this rank has its "
            f"tokens {piece.offset} to {piece.offset + piece.length} of {piece.document_length} "
            "here. Keep documents whole on a rank, in one nano-batch"
            + (f", or cut them at multiples of {kind.chunk} tokens" if kind.chunk else "")
        )
