"""The paper's scheduler (arXiv 2510.18121, section 4.2), kept as the baseline to compare with.

The ideal load F is total / n. Servers below it are served in descending order of what they lack:
each takes, over and over, from a server above F the item with the highest ``E = dF / V_comm``,
``dF = min(F_item, surplus of its server, deficit of the receiver)``. An item is moved whole if dF
is all of it, else split; a receiver stops within ``eps * F``, or when no item is left that gives it
128 tokens or more.

An item is a segment, or what splits have left of one: two pieces that lie symmetrically about the
segment's middle, a head and a tail, so that its query-key pairs are proportional to its tokens. A
split takes the inner tokens of both (as the authors' released code does). Shards end at multiples
of 128. Forward and backward are cut alike, by forward seconds.

What it does not know, the paper's scheduler does not know either: servers are identical (the first
one's profile), V_comm counts K and V of the whole context even where they already are, and memory
has no limit. Where in-place servers are absent, which the paper does not treat, segments start on
the receiving server with the least load, longest first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from control_plane.planner.compiled import BoolArray, compiled, compiled_inner
from control_plane.planner.costs import FORWARD, CostTables, task_seconds
from control_plane.planner.fleet import Fleet, build_fleet
from control_plane.planner.forecast import forecast_fleet
from control_plane.planner.planning import PlanningOptions, PlanningServer
from control_plane.planner.survey import survey
from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import MaskKind, Phase, TaskTable
from core_attention.errors import PlanError
from core_attention.manifest import Manifest
from core_attention.plan import Plan, PlanVerdict
from core_attention.shape import AttentionShape

SHARD_TOKENS = 128
"""Shards are multiples of it (paper, section 4.2)."""


def plan(
    manifest: Manifest,
    servers: Sequence[PlanningServer],
    shape: AttentionShape,
    options: PlanningOptions,
    *,
    epoch: int = 0,
) -> Plan:
    """Plans one step as the paper does; see :class:`~control_plane.planner.planning.Planner`.

    Of ``options`` only the tolerance counts.

    Raises:
        PlanError: a segment's rank has no server and no server receives; or ranks form pipelines,
            of which it knows nothing.
    """
    if options.pipelining is not None:
        raise PlanError("the greedy does not know pipelines")
    if shape.mask is not MaskKind.CAUSAL:
        raise PlanError(f"the greedy does not know mask {shape.mask.name}")
    fleet = build_fleet(servers, manifest.n_ranks)
    usable = fleet.receives & (fleet.speed > 0)
    columns = []
    stopped = 0
    for nano_batch in range(manifest.n_nano_batches):
        chosen = np.flatnonzero(
            manifest.document_nano_batch[manifest.segment_document] == nano_batch
        )
        if not chosen.size:
            continue
        start = _initial_servers(manifest, chosen, fleet, usable)
        *pieces, n_stopped = _balance(
            manifest.segment_offset[chosen],
            manifest.segment_length[chosen],
            start,
            usable,
            fleet.tables,
            fleet.profile[0],
            options.tolerance,
            float(shape.q_row_bytes + shape.o_row_bytes),
            float(shape.kv_row_bytes),
        )
        columns.append((chosen[pieces[0]], *pieces[1:]))
        stopped += n_stopped
    tasks = _table(manifest, *(np.concatenate(parts) for parts in zip(*columns, strict=True)))
    found = survey(manifest, fleet)
    forward, backward = (
        forecast_fleet(manifest, tasks, fleet, found, shape, phase) for phase in Phase
    )
    imbalance = max(forward.predicted_imbalance, backward.predicted_imbalance)
    return Plan(
        manifest=manifest,
        epoch=epoch,
        servers=tuple(server.server for server in servers),
        forward=tasks,
        backward=tasks,
        mask=MaskKind.CAUSAL,
        planner="greedy",
        reason=_reason(options.tolerance, stopped),
        verdict=PlanVerdict.of_imbalance(imbalance, options.tolerance),
        forward_forecast=forward,
        backward_forecast=backward,
    )


def _reason(tolerance: float, stopped: int) -> str:
    if stopped:
        return (
            f"{stopped} receivers stopped short of the mean load less {tolerance:g}: no item was "
            f"left that gives them {SHARD_TOKENS} tokens"
        )
    return f"every receiver is within {tolerance:g} of the mean load"


def _initial_servers(
    manifest: Manifest, chosen: Int64Array, fleet: Fleet, usable: BoolArray
) -> Int64Array:
    """``[n_chosen]`` where each segment starts: at home, else on the least loaded server."""
    server = fleet.server_of_rank[manifest.segment_rank[chosen]]
    homeless = (server < 0) | (fleet.speed[server] == 0)
    if not homeless.any():
        return server
    if not usable.any():
        rank = int(manifest.segment_rank[chosen[homeless]][0])
        raise PlanError(
            f"rank {rank} has no in-place server and none of the {len(usable)} servers may receive "
            "work: start an attention server, or let one receive"
        )
    _place_longest_first(
        manifest.segment_offset[chosen],
        manifest.segment_length[chosen],
        np.flatnonzero(usable),
        fleet.tables,
        fleet.profile[0],
        homeless,
        server,
    )
    return server


@compiled
def _place_longest_first(
    offset: Int64Array,
    length: Int64Array,
    receivers: Int64Array,
    tables: CostTables,
    profile: int,
    homeless: BoolArray,
    server: Int64Array,
) -> None:
    seconds = np.empty(len(offset))
    load = np.zeros(max(receivers.max(), server.max()) + 1)
    for i in range(len(offset)):
        seconds[i] = task_seconds(tables, profile, FORWARD, offset[i], offset[i] + length[i])
        if not homeless[i]:
            load[server[i]] += seconds[i]
    for i in np.argsort(-seconds, kind="mergesort"):
        if homeless[i]:
            server[i] = receivers[np.argmin(load[receivers])]
            load[server[i]] += seconds[i]


@compiled_inner
def _item_seconds(tables: CostTables, profile: int, head: Int64Array, tail: Int64Array) -> float:
    """Seconds of an item of two pieces; adjacent ones are one task."""
    if head[1] == tail[0]:
        return task_seconds(tables, profile, FORWARD, head[0], tail[1])
    seconds = task_seconds(tables, profile, FORWARD, head[0], head[1])
    return seconds + task_seconds(tables, profile, FORWARD, tail[0], tail[1])


@compiled_inner
def _best_item(
    n: int,
    surplus: Float64Array,
    receiver: int,
    work: Float64Array,
    server: Int64Array,
    head: Int64Array,
    tail: Int64Array,
    q_bytes: float,
    kv_bytes: float,
) -> int:
    """The one of the first ``n`` items of which the receiver gains the most for each byte that
    moves, all of the item or the inner part of it; -1 if there is none."""
    best, best_value = -1, 0.0
    for i in range(n):
        gain = min(work[i], surplus[server[i]], -surplus[receiver])
        if gain <= 0.0:
            continue
        tokens = (head[i, 1] - head[i, 0]) + (tail[i, 1] - tail[i, 0])
        if gain < work[i]:
            tokens = int(gain / work[i] * tokens)
            half = tokens // 2 // SHARD_TOKENS * SHARD_TOKENS
            if min(half, head[i, 1] - head[i, 0], tail[i, 1] - tail[i, 0]) <= 0:
                continue
        value = gain / (tokens * q_bytes + tail[i, 1] * kv_bytes)
        if value > best_value:
            best, best_value = i, value
    return best


@compiled
def _balance(
    offset: Int64Array,
    length: Int64Array,
    start: Int64Array,
    usable: BoolArray,
    tables: CostTables,
    profile: int,
    tolerance: float,
    q_bytes: float,
    kv_bytes: float,
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array, int]:
    """Moves items until every receiver has enough.

    Returns:
        The pieces: segment, q_begin, q_end, server; and how many receivers stopped early.
    """
    n, n_servers = len(offset), len(usable)
    room = n + 4 * n_servers + 64
    segment, server = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64)
    head, tail = np.empty((room, 2), dtype=np.int64), np.empty((room, 2), dtype=np.int64)
    work, load = np.empty(room), np.zeros(n_servers)
    for i in range(n):
        segment[i], server[i] = i, start[i]
        middle = offset[i] + length[i] // 2
        if length[i] >= 2 * SHARD_TOKENS:
            middle = (middle + SHARD_TOKENS // 2) // SHARD_TOKENS * SHARD_TOKENS
        head[i, 0], head[i, 1] = offset[i], middle
        tail[i, 0], tail[i, 1] = middle, offset[i] + length[i]
        work[i] = _item_seconds(tables, profile, head[i], tail[i])
        load[start[i]] += work[i]
    ideal = load.sum() / max(usable.sum(), 1)
    surplus = load - np.where(usable, ideal, load)
    order = np.argsort(surplus, kind="mergesort")
    stopped = 0
    for receiver in order:
        if not usable[receiver]:
            continue
        while -surplus[receiver] > tolerance * ideal:
            best = _best_item(n, surplus, receiver, work, server, head, tail, q_bytes, kv_bytes)
            if best < 0:
                stopped += 1
                break
            giver = server[best]
            before = work[best]
            gain = min(before, surplus[giver], -surplus[receiver])
            if gain >= before:
                server[best] = receiver
                surplus[giver] -= before
                surplus[receiver] += before
                continue
            if n == room:
                room *= 2
                segment, server = _grown(segment, room), _grown(server, room)
                head, tail = _grown_pairs(head, room), _grown_pairs(tail, room)
                grown = np.empty(room)
                grown[:n] = work
                work = grown
            tokens = (head[best, 1] - head[best, 0]) + (tail[best, 1] - tail[best, 0])
            half = int(gain / before * tokens) // 2 // SHARD_TOKENS * SHARD_TOKENS
            half = min(half, head[best, 1] - head[best, 0], tail[best, 1] - tail[best, 0])
            segment[n], server[n] = segment[best], receiver
            head[n, 0], head[n, 1] = head[best, 1] - half, head[best, 1]
            tail[n, 0], tail[n, 1] = tail[best, 0], tail[best, 0] + half
            head[best, 1] -= half
            tail[best, 0] += half
            work[n] = _item_seconds(tables, profile, head[n], tail[n])
            work[best] = _item_seconds(tables, profile, head[best], tail[best])
            surplus[giver] += work[best] - before
            surplus[receiver] += work[n]
            n += 1
    return _pieces(segment[:n], head[:n], tail[:n], server[:n], stopped)


@compiled_inner
def _grown(column: Int64Array, room: int) -> Int64Array:
    grown = np.empty(room, dtype=np.int64)
    grown[: len(column)] = column
    return grown


@compiled_inner
def _grown_pairs(column: Int64Array, room: int) -> Int64Array:
    grown = np.empty((room, 2), dtype=np.int64)
    grown[: len(column)] = column
    return grown


@compiled_inner
def _pieces(
    segment: Int64Array, head: Int64Array, tail: Int64Array, server: Int64Array, stopped: int
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array, int]:
    n = len(segment)
    columns = np.empty((4, 2 * n), dtype=np.int64)
    count = 0
    for i in range(n):
        for j in range(2):
            begin, end = (head[i, 0], head[i, 1]) if j == 0 else (tail[i, 0], tail[i, 1])
            if end > begin:
                columns[0, count], columns[1, count] = segment[i], begin
                columns[2, count], columns[3, count] = end, server[i]
                count += 1
    return columns[0, :count], columns[1, :count], columns[2, :count], columns[3, :count], stopped


def _table(
    manifest: Manifest,
    segment: Int64Array,
    q_begin: Int64Array,
    q_end: Int64Array,
    server: Int64Array,
) -> TaskTable:
    """The pieces in order, neighbours on one server joined."""
    order = np.lexsort((q_begin, segment))
    segment, q_begin, q_end, server = (c[order] for c in (segment, q_begin, q_end, server))
    first = np.ones(len(segment), dtype=np.bool_)
    first[1:] = (segment[1:] != segment[:-1]) | (server[1:] != server[:-1])
    last = np.append(first[1:], True)
    return TaskTable(
        manifest.segment_document[segment[first]], q_begin[first], q_end[last], server[first]
    )
