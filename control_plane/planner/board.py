"""The state of a plan in the making, for one phase of one nano-batch: who holds what.

Every rank has a list of *free* parts of its segments, those that run at home, latest end first;
an export turns some of a free part into a *chunk* on a server. Everything is arrays, so that
compiled code can work on it, and few of them, because compiled code counts references to each
array that it passes on. Lists are chains of indices, -1 ending them.
"""

from __future__ import annotations

from typing import NamedTuple

from control_plane.planner.chunk import CutRules
from control_plane.planner.compiled import BoolArray, compiled_leaf
from control_plane.planner.costs import task_seconds
from control_plane.planner.fleet import Fleet
from core_attention.arrays import Float64Array, Int64Array


class Segments(NamedTuple):
    """The segments of one nano-batch, ``[n]`` each, sorted by (document, begin).

    Attributes:
        document: index into the manifest's documents.
        begin, end: positions in the document.
        rank: home.
        whole: whether the segment is its whole document, which carries no keys over either.
        divided: whether any is not. If none is, the segments are the documents in order, each from
            its beginning, and ``document`` and ``begin`` need not be read: memory is what passes
            over all segments take time for.
        first_of_document: ``[n_documents + 1]`` of the manifest: the first segment of each
            document, counted from the first of this nano-batch.
    """

    document: Int64Array
    begin: Int64Array
    end: Int64Array
    rank: Int64Array
    whole: BoolArray
    divided: bool
    first_of_document: Int64Array


SEGMENT, BEGIN, END, NEXT, SERVER = 0, 1, 2, 3, 3
"""Columns of ``Board.free`` (which has NEXT) and ``Board.chunks`` (which has SERVER)."""
DOCUMENT, KEYS_END, NEXT_HELD = 0, 1, 2
"""Columns of ``Board.held``, and the first two of ``Board.own``."""


class Board(NamedTuple):
    """Loads, free parts, chunks, and who holds which keys.

    Attributes:
        load: ``[n_servers]`` predicted busy seconds.
        first_free: ``[n_ranks]`` head of each rank's free parts.
        free: ``[room, 4]`` the free parts: segment (-1: gone), begin, end, next of the rank.
        chunks: ``[room, 4]`` the exports so far: segment, begin, end, server.
        first_held: ``[n_servers]`` head of what a server holds of other homes' documents.
        held: ``[room, 3]`` document, keys end, next: it has the K and V of ``[0, keys end)``.
        own_first: ``[n_ranks + 1]`` bounds of each rank's entries in ``own``.
        own: ``[n, 2]`` documents that lie on several ranks, and the end of the rank's last
            segment of each: its home tasks read all keys up to there.
        server: ``[n_segments]`` who runs a homeless segment that moved whole without an entry
            among the chunks, -1 for all others; empty where no segment is homeless.
        used: ``[5]`` free parts, chunks and held entries in use; the first free part that is what
            a cut left; how many segments ``server`` names.
        spent: ``[2]`` bytes moved by exports, and the same weighted by link.
        rows: ``[n_servers]`` q plus k/v rows that a server can still hold, where any is limited.
    """

    load: Float64Array
    first_free: Int64Array
    free: Int64Array
    chunks: Int64Array
    first_held: Int64Array
    held: Int64Array
    own_first: Int64Array
    own: Int64Array
    server: Int64Array
    used: Int64Array
    spent: Float64Array
    rows: Int64Array


FREE, CHUNKS, HELD, FIRST_REST, MOVED_WHOLE = 0, 1, 2, 3, 4
BYTES, COST = 0, 1


@compiled_leaf
def resident_end(board: Board, fleet: Fleet, document: int, server: int) -> int:
    """The server holds, or its home tasks fetch, the keys ``[0, result)`` of ``document``."""
    end = 0
    rank = fleet.rank[server]
    if rank >= 0:
        for i in range(board.own_first[rank], board.own_first[rank + 1]):
            if board.own[i, DOCUMENT] == document:
                end = board.own[i, KEYS_END]
    i = board.first_held[server]
    while i >= 0:
        if board.held[i, DOCUMENT] == document:
            end = max(end, board.held[i, KEYS_END])
        i = board.held[i, NEXT_HELD]
    return end


@compiled_leaf
def hold(board: Board, document: int, server: int, end: int) -> None:
    """Notes that ``server`` now has the keys ``[0, end)`` of ``document``."""
    i = board.first_held[server]
    while i >= 0:
        if board.held[i, DOCUMENT] == document:
            board.held[i, KEYS_END] = max(board.held[i, KEYS_END], end)
            return
        i = board.held[i, NEXT_HELD]
    i = board.used[HELD]
    board.used[HELD] += 1
    board.held[i, DOCUMENT], board.held[i, KEYS_END] = document, end
    board.held[i, NEXT_HELD] = board.first_held[server]
    board.first_held[server] = i


@compiled_leaf
def add_free(board: Board, rank: int, segment: int, begin: int, end: int) -> None:
    """Adds a free part to the rank's list, at its place."""
    free = board.free
    new = board.used[FREE]
    board.used[FREE] += 1
    free[new, SEGMENT], free[new, BEGIN], free[new, END] = segment, begin, end
    before, at = -1, board.first_free[rank]
    while at >= 0 and free[at, END] > end:
        before, at = at, free[at, NEXT]
    free[new, NEXT] = at
    if before < 0:
        board.first_free[rank] = new
    else:
        free[before, NEXT] = new


@compiled_leaf
def remove_free(board: Board, rank: int, part: int) -> None:
    """Takes a free part out of the rank's list."""
    free = board.free
    free[part, SEGMENT] = -1
    if board.first_free[rank] == part:
        board.first_free[rank] = free[part, NEXT]
        return
    at = board.first_free[rank]
    while free[at, NEXT] != part:
        at = free[at, NEXT]
    free[at, NEXT] = free[part, NEXT]


@compiled_leaf
def server_seconds(fleet: Fleet, server: int, phase: int, begin: int, end: int) -> float:
    """Seconds of the task of queries ``[begin, end)`` on ``server``, whose speed is not 0."""
    seconds = task_seconds(fleet.tables, fleet.profile[server], phase, begin, end)
    return seconds / float(fleet.speed[server])


@compiled_leaf
def add_chunk(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    segment: int,
    begin: int,
    end: int,
    server: int,
    link: float,
) -> None:
    """Gives queries ``[begin, end)`` of ``segment`` to ``server``, which is not their home."""
    at = board.used[CHUNKS]
    board.used[CHUNKS] += 1
    board.chunks[at, SEGMENT], board.chunks[at, SERVER] = segment, server
    board.chunks[at, BEGIN], board.chunks[at, END] = begin, end
    document = segments.document[segment]
    # Nobody else needs keys of a document that moves whole.
    all_of_it = segments.whole[segment] and begin == 0 and end == segments.end[segment]
    resident = 0 if all_of_it else resident_end(board, fleet, document, server)
    moved = rules.q_bytes * (end - begin) + rules.kv_bytes * max(end - resident, 0)
    board.spent[BYTES] += moved
    board.spent[COST] += moved * link
    board.load[server] += server_seconds(fleet, server, rules.phase, begin, end)
    if fleet.is_limited:
        board.rows[server] -= end - begin + max(end - resident, 0)
    if not all_of_it:
        hold(board, document, server, end)


@compiled_leaf
def affordable(
    board: Board, fleet: Fleet, begin: int, end: int, server: int, resident: int
) -> bool:
    """Return whether ``server`` can hold a chunk, having the keys ``[0, resident)`` anyway."""
    return not fleet.is_limited or board.rows[server] >= end - begin + max(end - resident, 0)
