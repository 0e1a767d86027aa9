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
    """What a finished board says beyond who is at home where.

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
    """What is on the board."""
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
    pieces, n_segments = cuts.pieces, len(segments.begin)
    n = i = k = 0
    while i < n_segments:
        cut = pieces[k, SEGMENT] if k < len(pieces) else n_segments
        whole, there = slice(i, cut), slice(n, n + cut - i)
        if segments.divided:
            _copy(segments.document[whole], document[there])
            _copy(segments.begin[whole], q_begin[there])
        else:
            _count_from(segments.document[0] + i, document[there])
            q_begin[there] = 0
        _copy(segments.end[whole], q_end[there])
        _copy_servers(cuts.moved_to[whole], fleet, segments.rank[whole], server[there])
        n += cut - i
        while k < len(pieces) and pieces[k, SEGMENT] == cut:
            document[n], server[n] = segments.document[cut], pieces[k, SERVER]
            q_begin[n], q_end[n] = pieces[k, BEGIN], pieces[k, END]
            n += 1
            k += 1
        i = cut + 1


@compiled_leaf
def _copy(source: Int64Array, target: Int64Array) -> None:
    for i in range(len(source)):
        target[i] = source[i]


@compiled_leaf
def _count_from(first: int, target: Int64Array) -> None:
    for i in range(len(target)):
        target[i] = first + i


@compiled_leaf
def _copy_servers(moved_to: Int64Array, fleet: Fleet, rank: Int64Array, target: Int64Array) -> None:
    """Writes who runs segments that were not cut: where they moved whole (``moved_to``, which is
    empty where no segment is homeless), else the servers of their ranks."""
    for i in range(len(rank)):
        target[i] = fleet.server_of_rank[rank[i]]
    for i in range(len(moved_to)):
        if moved_to[i] >= 0:
            target[i] = moved_to[i]
