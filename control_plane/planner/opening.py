"""The board before anything has moved."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from control_plane.planner.board import (
    BEGIN,
    DOCUMENT,
    END,
    KEYS_END,
    NEXT,
    SEGMENT,
    Board,
    Segments,
)
from control_plane.planner.compiled import BoolArray, compiled_inner, compiled_leaf
from control_plane.planner.fleet import Fleet
from control_plane.planner.sorting import sorted_by
from control_plane.planner.target_load import Work
from core_attention.arrays import Int64Array

CHUNKS_PER_SERVER = 8
"""Room for chunks beside documents that move whole: a plan has one or two a server, more only where
the tolerance is 0."""


class Opening(NamedTuple):
    """The first state of every board of one phase.

    Attributes:
        first_free, free: as in ``Board``: the segments of all who may come to give.
        own_first, own: as in ``Board``.
    """

    first_free: Int64Array
    free: Int64Array
    own_first: Int64Array
    own: Int64Array


@compiled_inner
def prepare_opening(
    segments: Segments, n_ranks: int, fleet: Fleet, work: Work, lowest_cap: float, everyone: bool
) -> Opening:
    """Free parts of servers above ``lowest_cap`` seconds (of ``everyone`` where memory may force
    exports), shared documents of all."""
    n, n_servers = len(segments.begin), len(fleet.rank)
    homeless = work.is_homeless
    first_free = np.full(n_ranks, -1, dtype=np.int64)
    donates = np.zeros(n_ranks, dtype=np.bool_)
    own_count = np.zeros(n_ranks + 1, dtype=np.int64)
    for s in range(n_servers):
        rank = fleet.rank[s]
        if (
            rank >= 0
            and not homeless[rank]
            and (everyone or work.base[s] + work.load[s] > lowest_cap)
        ):
            donates[rank] = True
    given = np.empty(n, dtype=np.int64)
    n_given = _list_given(segments, donates, given, own_count)
    own_first = np.cumsum(own_count)
    own = np.full((own_first[n_ranks], 2), -1, dtype=np.int64)
    if len(own):
        _list_own(segments, homeless, own_first, own)
    free = np.empty((n_given, 4), dtype=np.int64)
    _list_free(segments, sorted_by(given[:n_given], segments.end), first_free, free)
    return Opening(first_free, free, own_first, own)


@compiled_leaf
def _list_given(
    segments: Segments, donates: BoolArray, given: Int64Array, own_count: Int64Array
) -> int:
    """Writes the segments of ranks that may come to give to ``given``, and counts the shared
    segments of each rank; returns how many were written."""
    n_given = 0
    for i in range(len(segments.rank)):
        rank = segments.rank[i]
        if segments.divided and not segments.whole[i]:
            own_count[rank + 1] += 1
        if donates[rank]:
            given[n_given] = i
            n_given += 1
    return n_given


@compiled_leaf
def _list_free(
    segments: Segments, order: Int64Array, first_free: Int64Array, free: Int64Array
) -> None:
    """Makes lists of the segments in ``order``, earliest ends first: each one goes to the head of
    its list."""
    for part in range(len(order)):
        i = order[part]
        free[part, SEGMENT] = i
        free[part, BEGIN], free[part, END] = segments.begin[i], segments.end[i]
        free[part, NEXT] = first_free[segments.rank[i]]
        first_free[segments.rank[i]] = part


@compiled_inner
def open_board(opening: Opening, work: Work, fleet: Fleet, n_segments: int) -> Board:
    """The board before any export."""
    n_servers, n_given = len(work.load), len(opening.free)
    n_homeless = len(work.homeless)
    room = CHUNKS_PER_SERVER * n_servers + 4 * n_homeless + 256 + n_given
    free = np.empty((n_given + 2 * room, 4), dtype=np.int64)
    free[:n_given] = opening.free
    return Board(
        work.load.copy(),
        opening.first_free.copy(),
        free,
        np.empty((room, 4), dtype=np.int64),
        np.full(n_servers, -1, dtype=np.int64),
        np.empty((room, 3), dtype=np.int64),
        opening.own_first,
        opening.own,
        np.full(n_segments if n_homeless else 0, -1, dtype=np.int64),
        np.array([n_given, 0, 0, n_given, 0]),
        np.zeros(2),
        fleet.capacity_rows.copy(),
    )


@compiled_inner
def _list_own(
    segments: Segments, homeless: BoolArray, own_first: Int64Array, own: Int64Array
) -> None:
    """Fills in the documents that lie on several ranks, for each of their ranks."""
    fill = own_first[:-1].copy()
    for i in range(len(segments.begin)):
        rank = segments.rank[i]
        if not segments.whole[i] and not homeless[rank]:
            # Segments come in order of position: the last one of a document and rank stays.
            at = fill[rank] - 1
            if at < own_first[rank] or own[at, DOCUMENT] != segments.document[i]:
                at = fill[rank]
                fill[rank] += 1
            own[at, DOCUMENT], own[at, KEYS_END] = segments.document[i], segments.end[i]


@compiled_inner
def hold_home_work(segments: Segments, fleet: Fleet, board: Board, homeless: BoolArray) -> None:
    """Takes the rows of the ranks' own tasks from what their servers can hold."""
    for i in range(len(segments.begin)):
        if homeless[segments.rank[i]]:
            continue
        server = fleet.server_of_rank[segments.rank[i]]
        board.rows[server] -= segments.end[i] - segments.begin[i]
        if segments.whole[i]:
            board.rows[server] -= segments.end[i]
    for rank in range(len(fleet.server_of_rank)):
        server = fleet.server_of_rank[rank]
        for k in range(board.own_first[rank], board.own_first[rank + 1]):
            if board.own[k, DOCUMENT] < 0:
                continue
            board.rows[server] -= board.own[k, KEYS_END]
