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
from control_plane.planner.compiled import compiled_inner
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
    count = k = 0
    for i in range(n_segments):
        if board.server[i] >= 0:
            document[count], server[count] = segments.document[i], board.server[i]
            q_begin[count], q_end[count] = segments.begin[i], segments.end[i]
            count += 1
            continue
        first = count
        while k < n_pieces and pieces[k, SEGMENT] == i:
            if count > first and server[count - 1] == pieces[k, SERVER]:
                q_end[count - 1] = pieces[k, END]
            else:
                document[count], server[count] = segments.document[i], pieces[k, SERVER]
                q_begin[count], q_end[count] = pieces[k, BEGIN], pieces[k, END]
                count += 1
            k += 1
    return Tasks(document[:count], q_begin[:count], q_end[:count], server[:count])


@compiled_inner
def _pieces(board: Board, segments: Segments, fleet: Fleet) -> Int64Array:
    """``[n, 4]`` the chunks, and what cuts left at home, sorted by segment and position."""
    n = board.used[CHUNKS]
    most = n + board.used[FREE] - board.used[FIRST_REST]
    pieces = np.empty((most, 4), dtype=np.int64)
    pieces[:n] = board.chunks[:n]
    for part in range(board.used[FIRST_REST], board.used[FREE]):
        segment = board.free[part, SEGMENT]
        if segment >= 0:
            pieces[n] = board.free[part]
            pieces[n, SERVER] = fleet.server_of_rank[segments.rank[segment]]
            n += 1
    key = pieces[:n, SEGMENT] * (1 << 31) + pieces[:n, BEGIN]
    in_order = np.empty((n, 4), dtype=np.int64)
    for k, piece in enumerate(sorted_by(np.arange(n), key)):
        in_order[k] = pieces[piece]
    return in_order
