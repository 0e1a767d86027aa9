"""The board before anything has moved."""

from __future__ import annotations

import numpy as np

from control_plane.planner.board import FREE, Board, Limits, Segments
from control_plane.planner.compiled import BoolArray, compiled_inner
from control_plane.planner.fleet import Fleet
from core_attention.arrays import Float64Array

CHUNKS_PER_SERVER = 8
"""Room for chunks; a plan has one or two a server, more only where the tolerance is 0."""


@compiled_inner
def open_board(
    segments: Segments,
    n_ranks: int,
    n_servers: int,
    load: Float64Array,
    fleet: Fleet,
    cap: Float64Array,
    homeless: BoolArray,
    everyone: bool,
) -> Board:
    """The board before any export: free parts of servers above the cap (of ``everyone`` where
    memory may force exports), shared documents of all."""
    n = len(segments.begin)
    room = CHUNKS_PER_SERVER * n_servers + 4 * int(homeless.sum()) + 256
    first_free = np.full(n_ranks, -1, dtype=np.int64)
    donates = np.zeros(n_ranks, dtype=np.bool_)
    n_free = 0
    own_count = np.zeros(n_ranks + 1, dtype=np.int64)
    for s in range(n_servers):
        donates[fleet.rank[s]] |= fleet.rank[s] >= 0 and (everyone or load[s] > cap[s])
    for i in range(n):
        n_free += donates[segments.rank[i]]
        own_count[segments.rank[i] + 1] += not segments.whole[i]
    own_first = np.cumsum(own_count)
    n_own = own_first[n_ranks]
    own_document, own_end = np.full(n_own, -1, dtype=np.int64), np.zeros(n_own, dtype=np.int64)
    fill = own_first[:n_ranks].copy()
    for i in range(n):
        rank = segments.rank[i]
        if not segments.whole[i] and not homeless[i]:
            # Segments come in order of position: the last one of a document and rank stays.
            at = fill[rank] - 1
            if at < own_first[rank] or own_document[at] != segments.document[i]:
                at = fill[rank]
                fill[rank] += 1
            own_document[at], own_end[at] = segments.document[i], segments.end[i]
    n_free += 2 * room
    free_segment, next_free = np.empty(n_free, dtype=np.int64), np.empty(n_free, dtype=np.int64)
    free_begin, free_end = np.empty(n_free, dtype=np.int64), np.empty(n_free, dtype=np.int64)
    given = np.empty(n, dtype=np.int64)
    count = np.zeros(3, dtype=np.int64)
    for i in range(n):
        if donates[segments.rank[i]] and not homeless[i]:
            given[count[FREE]] = i
            count[FREE] += 1
    given = given[: count[FREE]]
    # Earliest ends first, so that each one goes to the head of its list.
    order = given[np.argsort(segments.end[given], kind="mergesort")]
    for part in range(len(order)):
        i = order[part]
        free_segment[part] = i
        free_begin[part], free_end[part] = segments.begin[i], segments.end[i]
        next_free[part] = first_free[segments.rank[i]]
        first_free[segments.rank[i]] = part
    return Board(
        load,
        first_free,
        free_segment,
        free_begin,
        free_end,
        next_free,
        np.empty(room, dtype=np.int64),
        np.empty(room, dtype=np.int64),
        np.empty(room, dtype=np.int64),
        np.empty(room, dtype=np.int64),
        np.full(n_servers, -1, dtype=np.int64),
        np.empty(room, dtype=np.int64),
        np.empty(room, dtype=np.int64),
        np.empty(room, dtype=np.int64),
        own_first,
        own_document,
        own_end,
        np.zeros(n, dtype=np.bool_),
        count,
        np.zeros(2),
    )


@compiled_inner
def limits_after_home_work(
    segments: Segments, fleet: Fleet, board: Board, limits: Limits, homeless: BoolArray
) -> Limits:
    """The limits less what the ranks' own tasks hold and fetch."""
    if not limits.active:
        return limits
    rows, sent = limits.rows.copy(), limits.sent_bytes.copy()
    received = limits.received_bytes.copy()
    for i in range(len(segments.begin)):
        if homeless[i]:
            continue
        server = fleet.server_of_rank[segments.rank[i]]
        rows[server] -= segments.end[i] - segments.begin[i]
        if segments.whole[i]:
            rows[server] -= segments.end[i]
    for rank in range(len(fleet.server_of_rank)):
        server = fleet.server_of_rank[rank]
        for k in range(board.own_first[rank], board.own_first[rank + 1]):
            if board.own_document[k] < 0:
                continue
            rows[server] -= board.own_end[k]
    for i in range(len(segments.begin)):
        # What home tasks fetch of their document's earlier segments; each rank's last segment
        # of a document fetches it all.
        if homeless[i] or segments.whole[i] or not _is_last_own(board, segments, i):
            continue
        rank = segments.rank[i]
        for j in range(segments.first[i], i):
            other = segments.rank[j]
            if other != rank:
                keys = segments.end[j] - segments.begin[j]
                sent[other] -= keys * limits.kv_request
                received[other] -= keys * limits.kv_reply
                received[rank] -= keys * limits.kv_request
                sent[rank] -= keys * limits.kv_reply
    return Limits(
        True,
        rows,
        sent,
        received,
        limits.q_request,
        limits.kv_request,
        limits.q_reply,
        limits.kv_reply,
    )


@compiled_inner
def _is_last_own(board: Board, segments: Segments, segment: int) -> bool:
    """Whether no later segment of the same document is at home on the same rank."""
    rank = segments.rank[segment]
    for k in range(board.own_first[rank], board.own_first[rank + 1]):
        if board.own_document[k] == segments.document[segment]:
            return bool(board.own_end[k] == segments.end[segment])
    return False
