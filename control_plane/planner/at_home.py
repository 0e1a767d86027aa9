"""Plans that take no planning: each segment stays with its rank's own server, or goes to the pool
server that has the least to do. They are made where a better plan would hold up a step."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from control_plane.planner.forecast import row_bytes
from control_plane.planner.planning import PlanningOptions, PlanningServer
from core_attention.arrays import BoolArray, Float64Array, Int64Array
from core_attention.ca_task import Phase, TaskTable
from core_attention.errors import PlanError
from core_attention.manifest import Manifest
from core_attention.plan import AT_HOME, PhaseForecast, Plan
from core_attention.shape import AttentionShape


def plan(
    manifest: Manifest,
    servers: Sequence[PlanningServer],
    shape: AttentionShape,
    options: PlanningOptions,
    *,
    epoch: int = 0,
    why: str,
) -> Plan:
    """Plans one step; see :class:`~control_plane.planner.planning.Planner`. ``why`` says in words
    why it is not done better."""
    own = np.full(manifest.n_ranks, -1, dtype=np.int64)
    for index, each in enumerate(servers):
        if each.server.in_place_rank is not None:
            own[each.server.in_place_rank] = index
    begin = manifest.segment_offset
    tasks = TaskTable(
        manifest.segment_document,
        begin,
        begin + manifest.segment_length,
        own[manifest.segment_rank],
        mask=shape.mask,
    )
    tasks = replace(tasks, server=_spread(manifest, tasks, servers))
    at_home = tasks.server == own[manifest.segment_rank]
    forward, backward = (
        _forecast(manifest, tasks, at_home, servers, shape, phase) for phase in Phase
    )
    _check_capacity(servers, forward)
    return Plan(
        manifest=manifest,
        epoch=epoch,
        servers=tuple([each.server for each in servers]),
        forward=tasks,
        backward=tasks,
        mask=shape.mask,
        planner=AT_HOME,
        reason=why,
        forward_forecast=forward,
        backward_forecast=backward,
        tasks_are_valid=True,
    )


def _spread(manifest: Manifest, tasks: TaskTable, servers: Sequence[PlanningServer]) -> Int64Array:
    """``[n_tasks]`` the servers, of tasks without one at home those with the least work, the
    largest task first."""
    server, pairs = tasks.server.copy(), tasks.qk_pairs(manifest)
    nano_batch = manifest.document_nano_batch[tasks.document]
    away = np.flatnonzero(server < 0)
    takers = [i for i, each in enumerate(servers) if each.receives and each.speed > 0]
    if away.size and not takers:
        raise PlanError("no server can take the work of ranks without one of their own")
    for lane in np.unique(nano_batch[away]).tolist():
        loads = [(0.0, taker) for taker in takers]
        of_lane = away[nano_batch[away] == lane]
        for task in of_lane[np.argsort(-pairs[of_lane], kind="stable")].tolist():
            load, least = loads[0]
            server[task] = least
            heapq.heapreplace(loads, (load + float(pairs[task]) / servers[least].speed, least))
    return server


def _forecast(
    manifest: Manifest,
    tasks: TaskTable,
    at_home: BoolArray,
    servers: Sequence[PlanningServer],
    shape: AttentionShape,
    phase: Phase,
) -> PhaseForecast:
    nano_batch, rank = manifest.document_nano_batch[tasks.document], manifest.segment_rank
    q, kv = tasks.q_end - tasks.q_begin, tasks.k_end(manifest)
    seconds = np.empty(len(tasks))
    for index in np.unique(tasks.server).tolist():
        of_server, each = tasks.server == index, servers[index]
        seconds[of_server] = each.profile.seconds(q[of_server], kv[of_server], phase)
        seconds[of_server] /= each.speed or 1.0
    # Keys count once for each document on a server.
    pairs, of_task = np.unique(
        np.stack([nano_batch, tasks.server, tasks.document]), axis=1, return_inverse=True
    )
    kv_rows, kv_at_home = np.zeros((2, pairs.shape[1]), dtype=np.int64)
    np.maximum.at(kv_rows, of_task.ravel(), kv)
    np.add.at(kv_at_home, of_task.ravel(), q * at_home)
    away = np.maximum(kv_rows - kv_at_home, 0)
    per_row, size = row_bytes(shape, phase), (manifest.n_nano_batches, len(servers))
    q_away = _summed(size, (nano_batch, tasks.server), q * ~at_home)
    kv_away = _summed(size, (pairs[0], pairs[1]), away)
    return PhaseForecast(
        home_seconds=_summed((size[0], manifest.n_ranks), (nano_batch, rank), seconds),
        seconds=_summed(size, (nano_batch, tasks.server), seconds),
        q_rows=_summed(size, (nano_batch, tasks.server), q).astype(np.int64),
        kv_rows=_summed(size, (pairs[0], pairs[1]), kv_rows).astype(np.int64),
        bytes_in=(q_away * per_row.q_request + kv_away * per_row.kv_request).astype(np.int64),
        bytes_out=(q_away * per_row.q_reply + kv_away * per_row.kv_reply).astype(np.int64),
    )


def _summed(
    size: tuple[int, int], at: tuple[Int64Array, Int64Array], values: Int64Array | Float64Array
) -> Float64Array:
    total = np.zeros(size)
    np.add.at(total, at, values)
    return total


def _check_capacity(servers: Sequence[PlanningServer], forecast: PhaseForecast) -> None:
    rows = (forecast.q_rows + forecast.kv_rows).max(axis=0).tolist()
    for each, n_rows in zip(servers, rows, strict=True):
        if each.capacity_rows is not None and n_rows > each.capacity_rows:
            raise PlanError(
                f"server {each.server.server_id} has room for {each.capacity_rows} rows, and "
                f"documents left whole would bring it {n_rows}"
            )
