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
from control_plane.planner.compiled import compiled_inner, compiled_leaf
from control_plane.planner.fleet import Fleet
from control_plane.planner.sorting import sorted_by
from core_attention.arrays import Int64Array


class Tasks(NamedTuple):
    """CA-tasks sorted by (document, q_begin)."""

    document: Int64Array
    q_begin: Int64Array
    q_end: Int64Array
    server: Int64Array


@compiled_inner
def collect_tasks(board: Board, segments: Segments, fleet: Fleet) -> Tasks:
    """The tasks on the board, in order, neighbours of one segment and server joined."""
    pieces = _pieces(board, segments, fleet)
    n_segments, n_pieces = len(segments.begin), len(pieces)
    size = n_segments + n_pieces
    document, q_begin = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
    q_end, server = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
    tasks = Tasks(document, q_begin, q_end, server)
    n = i = k = 0
    while i < n_segments:
        cut = pieces[k, SEGMENT] if k < n_pieces else n_segments
        whole, there = slice(i, cut), slice(n, n + cut - i)
        _copy(segments.document[whole], document[there])
        _copy(segments.begin[whole], q_begin[there])
        _copy(segments.end[whole], q_end[there])
        _copy_servers(board.server[whole], fleet, segments.rank[whole], server[there])
        n += cut - i
        last = k
        while last < n_pieces and pieces[last, SEGMENT] == cut:
            last += 1
        if last > k:
            n = _write_pieces(pieces[k:last], segments.document[cut], tasks, n)
        i, k = cut + 1, last
    return Tasks(document[:n], q_begin[:n], q_end[:n], server[:n])


@compiled_leaf
def _copy(source: Int64Array, target: Int64Array) -> None:
    for i in range(len(source)):
        target[i] = source[i]


@compiled_leaf
def _copy_servers(moved_to: Int64Array, fleet: Fleet, rank: Int64Array, target: Int64Array) -> None:
    """Writes who runs segments that were not cut: where they moved whole (``moved_to``, which is
    empty where no segment is homeless), else the servers of their ranks."""
    for i in range(len(rank)):
        target[i] = fleet.server_of_rank[rank[i]]
    for i in range(len(moved_to)):
        if moved_to[i] >= 0:
            target[i] = moved_to[i]


@compiled_leaf
def _write_pieces(pieces: Int64Array, document: int, tasks: Tasks, n: int) -> int:
    """Writes the pieces of one segment after ``n`` tasks; returns how many tasks there are then."""
    first = n
    for k in range(len(pieces)):
        if n > first and tasks.server[n - 1] == pieces[k, SERVER]:
            tasks.q_end[n - 1] = pieces[k, END]
        else:
            tasks.document[n], tasks.server[n] = document, pieces[k, SERVER]
            tasks.q_begin[n], tasks.q_end[n] = pieces[k, BEGIN], pieces[k, END]
            n += 1
    return n


@compiled_inner
def _pieces(board: Board, segments: Segments, fleet: Fleet) -> Int64Array:
    """``[n, 4]`` the chunks, and what cuts left at home, sorted by segment and position."""
    most = board.used[CHUNKS] + board.used[FREE] - board.used[FIRST_REST]
    pieces, key = np.empty((most, 4), dtype=np.int64), np.empty(most, dtype=np.int64)
    n = _list_pieces(board, segments, fleet, pieces, key)
    in_order = np.empty((n, 4), dtype=np.int64)
    _copy_rows(pieces, sorted_by(np.arange(n), key), in_order)
    return in_order


@compiled_leaf
def _list_pieces(
    board: Board, segments: Segments, fleet: Fleet, pieces: Int64Array, key: Int64Array
) -> int:
    """Writes the pieces and what they are sorted by; returns how many there are."""
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
def _copy_rows(source: Int64Array, order: Int64Array, target: Int64Array) -> None:
    for k in range(len(order)):
        for column in range(4):
            target[k, column] = source[order[k], column]
