"""From a finished board to sorted columns of CA-tasks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from control_plane.planner.board import CHUNKS, FREE, Board, Segments
from control_plane.planner.compiled import compiled_inner
from control_plane.planner.fleet import Fleet
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
    n_chunks, n_free = board.used[CHUNKS], board.used[FREE]
    segment = np.empty(n_chunks + n_free, dtype=np.int64)
    begin, end = np.empty_like(segment), np.empty_like(segment)
    server = np.empty_like(segment)
    n = n_chunks
    for i in range(n_chunks):
        segment[i], server[i] = board.chunk_segment[i], board.chunk_server[i]
        begin[i], end[i] = board.chunk_begin[i], board.chunk_end[i]
    for rank in range(len(board.first_free)):
        part = board.first_free[rank]
        while part >= 0:
            if board.touched[board.free_segment[part]]:
                segment[n], server[n] = board.free_segment[part], fleet.server_of_rank[rank]
                begin[n], end[n] = board.free_begin[part], board.free_end[part]
                n += 1
            part = board.next_free[part]
    key = segment[:n] * (1 << 31) + begin[:n]
    order = np.argsort(key, kind="mergesort")
    n_segments = len(segments.begin)
    out = np.empty((4, n_segments + n), dtype=np.int64)
    count = k = 0
    for i in range(n_segments):
        if not board.touched[i]:
            out[0, count], out[1, count] = segments.document[i], segments.begin[i]
            out[2, count] = segments.end[i]
            out[3, count] = fleet.server_of_rank[segments.rank[i]]
            count += 1
            continue
        first = count
        while k < n and segment[order[k]] == i:
            at = order[k]
            k += 1
            if count > first and out[3, count - 1] == server[at]:
                out[2, count - 1] = end[at]
                continue
            out[0, count], out[1, count] = segments.document[i], begin[at]
            out[2, count], out[3, count] = end[at], server[at]
            count += 1
    return Tasks(out[0, :count], out[1, :count], out[2, :count], out[3, :count])
