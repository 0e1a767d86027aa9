"""From a finished board to sorted columns of CA-tasks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from control_plane.planner.board import (
    BEGIN,
    CHUNKS,
    END,
    FIRST_REST,
    FREE,
    SEGMENT,
    SERVER,
    Board,
    Segments,
)
from control_plane.planner.compiled import compiled, compiled_inner, compiled_leaf
from control_plane.planner.fleet import Fleet
from control_plane.planner.sorting import sorted_by
from core_attention.arrays import Int64Array


class Cuts(NamedTuple):
    """The moves on a finished board, beyond homes.

    Attributes:
        pieces: ``[n, 4]`` of all segments that were cut or exported: segment, begin, end, server;
            sorted, neighbours of one segment and server joined.
        moved_to: ``[n_segments]``, or empty, as ``Board.server``.
        n_tasks: how many tasks there are in all.
    """

    pieces: Int64Array
    moved_to: Int64Array
    n_tasks: int


@compiled_inner
def collect_cuts(board: Board, segments: Segments, fleet: Fleet) -> Cuts:
    """The pieces on the board."""
    most = board.used[CHUNKS] + board.used[FREE] - board.used[FIRST_REST]
    pieces, key = np.empty((most, 4), dtype=np.int64), np.empty(most, dtype=np.int64)
    n = _list_pieces(board, segments, fleet, pieces, key)
    in_order = np.empty((n, 4), dtype=np.int64)
    n_joined, n_segments = _join_pieces(pieces, sorted_by(np.arange(n), key), in_order)
    n_tasks = len(segments.begin) - n_segments + n_joined
    return Cuts(in_order[:n_joined], board.server, n_tasks)


@compiled_leaf
def _list_pieces(
    board: Board, segments: Segments, fleet: Fleet, pieces: Int64Array, key: Int64Array
) -> int:
    """Writes the chunks, and what cuts left at home, and what they are sorted by, segment and
    position; returns how many there are."""
    n = longest = 0
    for at in range(board.used[CHUNKS]):
        pieces[n, SEGMENT], pieces[n, SERVER] = board.chunks[at, SEGMENT], board.chunks[at, SERVER]
        pieces[n, BEGIN], pieces[n, END] = board.chunks[at, BEGIN], board.chunks[at, END]
        longest = max(longest, pieces[n, END])
        n += 1
    for part in range(board.used[FIRST_REST], board.used[FREE]):
        segment = board.free[part, SEGMENT]
        if segment >= 0:
            pieces[n, SEGMENT] = segment
            pieces[n, SERVER] = fleet.server_of_rank[segments.rank[segment]]
            pieces[n, BEGIN], pieces[n, END] = board.free[part, BEGIN], board.free[part, END]
            longest = max(longest, pieces[n, END])
            n += 1
    for k in range(n):
        key[k] = pieces[k, SEGMENT] * longest + pieces[k, BEGIN]
    return n


@compiled_leaf
def _join_pieces(pieces: Int64Array, order: Int64Array, joined: Int64Array) -> tuple[int, int]:
    """Writes the pieces in ``order``, neighbours of one segment and server as one; returns how many
    these are, and of how many segments."""
    n = n_segments = 0
    for k in order:
        same_segment = n > 0 and joined[n - 1, SEGMENT] == pieces[k, SEGMENT]
        if same_segment and joined[n - 1, SERVER] == pieces[k, SERVER]:
            joined[n - 1, END] = pieces[k, END]
            continue
        for column in range(4):
            joined[n, column] = pieces[k, column]
        n += 1
        n_segments += not same_segment
    return n, n_segments


@compiled
def write_tasks(
    cuts: Cuts,
    segments: Segments,
    fleet: Fleet,
    document: Int64Array,
    q_begin: Int64Array,
    q_end: Int64Array,
    server: Int64Array,
) -> None:
    """Writes the tasks, sorted by (document, q_begin), to four columns of ``cuts.n_tasks``."""
    _write(cuts, segments, fleet, document, q_begin, q_end, server)


@compiled_leaf
def _write(
    cuts: Cuts,
    segments: Segments,
    fleet: Fleet,
    document: Int64Array,
    q_begin: Int64Array,
    q_end: Int64Array,
    server: Int64Array,
) -> None:
    pieces, n_segments = cuts.pieces, len(segments.begin)
    n = i = k = 0
    while i < n_segments:
        cut = pieces[k, SEGMENT] if k < len(pieces) else n_segments
        if segments.divided:
            _copy(segments.document, i, document, n, cut - i)
            _copy(segments.begin, i, q_begin, n, cut - i)
        else:
            _count_from(segments.document[i], document, n, cut - i)
            _clear(q_begin, n, cut - i)
        _copy(segments.end, i, q_end, n, cut - i)
        _copy_servers(cuts.moved_to, fleet, segments.rank, i, server, n, cut - i)
        n += cut - i
        while k < len(pieces) and pieces[k, SEGMENT] == cut:
            document[n], server[n] = segments.document[cut], pieces[k, SERVER]
            q_begin[n], q_end[n] = pieces[k, BEGIN], pieces[k, END]
            n += 1
            k += 1
        i = cut + 1


@compiled
def write_tasks_of_pieces(
    cuts: Cuts,
    segments: Segments,
    fleet: Fleet,
    document: Int64Array,
    q_begin: Int64Array,
    q_end: Int64Array,
    server: Int64Array,
) -> None:
    """The same for pieces of which only those of one segment are in order, one after another."""
    n = len(cuts.pieces)
    order = sorted_by(np.arange(n), np.ascontiguousarray(cuts.pieces[:, SEGMENT]))
    pieces = np.empty((n, 4), dtype=np.int64)
    _copy_rows(cuts.pieces, order, pieces)
    in_order = Cuts(pieces, cuts.moved_to, cuts.n_tasks)
    write_tasks(in_order, segments, fleet, document, q_begin, q_end, server)


@compiled_leaf
def _copy_rows(source: Int64Array, order: Int64Array, target: Int64Array) -> None:
    for k in range(len(order)):
        for column in range(target.shape[1]):
            target[k, column] = source[order[k], column]


@compiled_leaf
def _copy(source: Int64Array, at: int, target: Int64Array, to: int, count: int) -> None:
    for k in range(count):
        target[to + k] = source[at + k]


@compiled_leaf
def _clear(target: Int64Array, to: int, count: int) -> None:
    for k in range(count):
        target[to + k] = 0


@compiled_leaf
def _count_from(first: int, target: Int64Array, to: int, count: int) -> None:
    for k in range(count):
        target[to + k] = first + k


@compiled_leaf
def _copy_servers(
    moved_to: Int64Array,
    fleet: Fleet,
    rank: Int64Array,
    at: int,
    target: Int64Array,
    to: int,
    count: int,
) -> None:
    """Writes who runs segments that were not cut: where they moved whole (``moved_to``, which is
    empty where no segment is homeless), else the servers of their ranks."""
    for k in range(count):
        target[to + k] = fleet.server_of_rank[rank[at + k]]
    if len(moved_to) > 0:
        for k in range(count):
            if moved_to[at + k] >= 0:
                target[to + k] = moved_to[at + k]
