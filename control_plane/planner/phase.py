"""One phase of one nano-batch, from segments and servers to tasks: the steps in their order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from control_plane.planner.board import (
    BYTES,
    CHUNKS,
    COST,
    FREE,
    Board,
    Limits,
    Segments,
)
from control_plane.planner.chunk import CutRules, with_alignment
from control_plane.planner.compiled import BoolArray, compiled, compiled_inner
from control_plane.planner.costs import causal_pairs
from control_plane.planner.exports import Links, Variant, export_surplus
from control_plane.planner.fleet import Fleet
from control_plane.planner.level import expected_growth, find_level, typical_pair_seconds
from control_plane.planner.memory import relieve_memory
from control_plane.planner.placement import by_pairs, place_homeless
from core_attention.arrays import Float64Array, Int64Array

CHUNKS_PER_SERVER = 8
"""Room for chunks; a plan has one or two a server, more only where the tolerance is 0."""
CORRECTIONS = 2
"""How often the level is corrected for the rates of the pieces."""
MOST_SHIFTS = 2
"""Shifts of each cut that are tried for small fleets, which are planned several times anyway."""
LARGEST_DRIFT = 5e-3
"""Relative error of the level that is left uncorrected."""


class Tasks(NamedTuple):
    """CA-tasks sorted by (document, q_begin)."""

    document: Int64Array
    q_begin: Int64Array
    q_end: Int64Array
    server: Int64Array


class Outcome(NamedTuple):
    """What happened while planning a phase of a nano-batch.

    Attributes:
        level: seconds in which all servers would finish if work could be divided at will.
        scale: factor on the level, for the rates at which pieces run.
        work_ratio: seconds of the plan's tasks to those of the uncut segments at home.
        raised: by how many seconds the cap was raised above (1 + eps) x level; infinite if some
            server stayed above it.
        spent_bytes: bytes moved, beyond what documents that span ranks need anyway.
        n_chunks: pieces that left their home.
        stuck_segment, stuck_end: the first part that fits on no server, else -1.
        stuck_server: a server whose own rank's rows exceed its memory and fit nowhere, else -1.
        n_donors: servers that gave work.
    """

    level: float
    scale: float
    work_ratio: float
    raised: float
    spent_bytes: float
    n_chunks: int
    stuck_segment: int
    stuck_end: int
    stuck_server: int
    n_donors: int


@compiled
def plan_phase(
    segments: Segments,
    home_seconds: Float64Array,
    fleet: Fleet,
    rules: CutRules,
    limits: Limits,
    links: Links,
    tolerance: float,
    n_variants: int,
) -> tuple[Tasks, Outcome]:
    """Plans one phase of one nano-batch.

    Args:
        home_seconds: ``[n_segments]`` of each segment at home.
        limits: what each server and process may take, before any work is given to it.
        n_variants: plans to make; the cheapest that keeps the tolerance best is returned.
    """
    scale = 0.0
    n_shifts = MOST_SHIFTS if n_variants > 1 else 0
    plain = Variant(0, 0.0, n_shifts)
    best = _plan_variant(
        segments,
        home_seconds,
        fleet,
        rules,
        limits,
        links,
        tolerance,
        scale,
        plain,
    )
    for _ in range(CORRECTIONS):
        # Pieces run at other rates than whole documents, so cutting changes the mean load.
        drift = best[1].work_ratio / best[1].scale
        if _is_final(best[1]) or abs(drift - 1.0) < LARGEST_DRIFT:
            break
        scale = best[1].work_ratio
        best = _plan_variant(
            segments,
            home_seconds,
            fleet,
            rules,
            limits,
            links,
            tolerance,
            scale,
            plain,
        )
    for seed in range(1, n_variants):
        if _is_final(best[1]) or best[1].n_donors == 0:
            break
        variant = Variant(seed, 0.05 * (1 + seed % 6), seed % (n_shifts + 1))
        other = _plan_variant(
            segments, home_seconds, fleet, rules, limits, links, tolerance, best[1].scale, variant
        )
        if other[1].stuck_server < 0 and _better(other[1], other[2], best[1], best[2]):
            best = other
    return best[0], best[1]


@compiled_inner
def _is_final(outcome: Outcome) -> bool:
    """Whether planning again cannot help: nothing has moved, or something fits nowhere."""
    return outcome.n_chunks == 0 or outcome.stuck_segment >= 0 or outcome.stuck_server >= 0


@compiled_inner
def _better(ours: Outcome, our_cost: float, theirs: Outcome, their_cost: float) -> bool:
    """Whether a plan is cheaper without a higher cap, or has a lower one."""
    margin = 1e-3 * theirs.level
    if ours.raised > theirs.raised + margin:
        return False
    return ours.raised < theirs.raised - margin or our_cost < their_cost


@compiled_inner
def _plan_variant(
    segments: Segments,
    home_seconds: Float64Array,
    fleet: Fleet,
    rules: CutRules,
    limits: Limits,
    links: Links,
    tolerance: float,
    scale: float,
    variant: Variant,
) -> tuple[Tasks, Outcome, float]:
    """One plan, what happened, and its bytes weighted by link. A ``scale`` of 0: estimate it."""
    n_servers, n_ranks = len(fleet.rank), len(fleet.server_of_rank)
    pair_rate = typical_pair_seconds(segments, fleet, rules.phase)
    receives = fleet.receives & (fleet.speed > 0.0)
    load, pairs = np.zeros(n_servers), np.zeros(n_servers)
    homeless = np.zeros(len(segments.begin), dtype=np.bool_)
    homeless_pairs = 0.0
    for i in range(len(segments.begin)):
        server = fleet.server_of_rank[segments.rank[i]]
        held = causal_pairs(segments.begin[i], segments.end[i])
        if server >= 0 and fleet.speed[server] > 0.0:
            load[server] += home_seconds[i]
            pairs[server] += held
        else:
            homeless[i] = True
            homeless_pairs += held
    work_before = homeless_pairs + _work(load, pair_rate)
    level = find_level(load, homeless_pairs, pair_rate, receives)
    if scale == 0.0:
        scale = expected_growth(fleet, rules, load, pairs, pair_rate, level, work_before)
    level *= scale
    rules = with_alignment(rules, level / pair_rate.min(), segments.end.max())
    cap = np.full(n_servers, level * (1.0 + tolerance))
    cap[fleet.speed == 0.0] = 0.0
    board = _open_board(segments, n_ranks, n_servers, load, fleet, cap, homeless, limits.active)
    limits = _after_home_work(segments, fleet, board, limits, homeless)
    first_cap = cap.max()
    stuck, stuck_end, stuck_server = -1, 0, -1
    raised = 0.0
    n_donors = 0
    for s in range(n_servers):
        n_donors += board.load[s] > cap[s] * (1.0 + 1e-3) and fleet.rank[s] >= 0
    if homeless_pairs > 0.0:
        order = by_pairs(segments, homeless)
        if receives.any():
            stuck, stuck_end = place_homeless(
                board, segments, fleet, rules, limits, links, cap, receives, pair_rate, order
            )
        else:
            stuck, stuck_end = order[0], segments.end[order[0]]
    if stuck < 0 and limits.active:
        stuck_server = relieve_memory(board, segments, fleet, rules, limits, links, cap, receives)
    if stuck < 0 and stuck_server < 0:
        raised = export_surplus(
            board, segments, fleet, rules, limits, links, cap, receives, pair_rate, variant
        )
        if np.isfinite(raised):
            raised = cap.max() - first_cap
    work_ratio = _work(board.load, pair_rate) / work_before
    outcome = Outcome(
        level,
        scale,
        work_ratio,
        raised,
        board.spent[BYTES],
        board.used[CHUNKS],
        stuck,
        stuck_end,
        stuck_server,
        n_donors,
    )
    return _collect(board, segments, fleet), outcome, board.spent[COST]


@compiled_inner
def _work(load: Float64Array, pair_rate: Float64Array) -> float:
    """The load of all servers in query-key pairs at their typical rates."""
    work = 0.0
    for s in range(len(load)):
        if load[s] > 0.0:
            work += load[s] / pair_rate[s]
    return work


@compiled_inner
def _open_board(
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
def _after_home_work(
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


@compiled_inner
def _collect(board: Board, segments: Segments, fleet: Fleet) -> Tasks:
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
