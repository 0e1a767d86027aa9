"""Small boards for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from control_plane.planner.board import Board, Segments

N_ROOM = 16


def segments_of(rows: Sequence[tuple[int, int, int, int]]) -> Segments:
    """Segments given as (document, begin, end, rank), sorted."""
    document, begin, end, rank = np.array(rows, dtype=np.int64).T
    n_documents = int(document.max()) + 1
    counts = np.bincount(document, minlength=n_documents)
    whole = counts[document] == 1
    first = np.concatenate([[0], np.cumsum(counts)])
    return Segments(document, begin, end, rank, whole, not whole.all(), first)


def empty_board(n_servers: int, n_ranks: int, own: Sequence[Sequence[tuple[int, int]]]) -> Board:
    """Nothing is free, nothing has moved; ``own``: by rank, its (document, keys end)."""
    entries = [entry for rank in own for entry in rank]
    return Board(
        load=np.zeros(n_servers),
        first_free=np.full(n_ranks, -1),
        free=np.zeros((N_ROOM, 4), dtype=np.int64),
        chunks=np.zeros((N_ROOM, 4), dtype=np.int64),
        first_held=np.full(n_servers, -1),
        held=np.zeros((N_ROOM, 3), dtype=np.int64),
        own_first=np.cumsum([0, *(len(rank) for rank in own)]),
        own=np.array(entries, dtype=np.int64).reshape(-1, 2),
        server=np.empty(0, dtype=np.int64),
        used=np.zeros(5, dtype=np.int64),
        spent=np.zeros(2),
        rows=np.full(n_servers, 10**6),
    )
