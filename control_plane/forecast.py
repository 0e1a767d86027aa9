"""Forecasts: what a plan will cost each server in seconds, rows and bytes.

Pure functions of (manifest, tasks, servers, shape). Bytes are those of one tick, one layer: K and V
of a row count once per destination however many tasks read them, and what is at home at its
destination is not counted. Padding between the sections of a message (under 1.5 KiB a message) is
left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from control_plane.planner.compiled import compiled
from control_plane.planner.costs import (
    BACKWARD,
    FORWARD,
    PHASE_INDEX,
    causal_pairs,
    pair_seconds_of_both,
    task_seconds,
)
from control_plane.planner.fleet import Fleet, build_fleet
from control_plane.planning import PlanningServer
from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase, TaskTable
from core_attention.manifest import Manifest
from core_attention.plan import PhaseForecast
from core_attention.shape import AttentionShape


class RowBytes(NamedTuple):
    """Bytes that travel for one row.

    Attributes:
        q_request, kv_request: from its home to the server.
        q_reply, kv_reply: back.
    """

    q_request: int
    kv_request: int
    q_reply: int
    kv_reply: int


def row_bytes(shape: AttentionShape, phase: Phase) -> RowBytes:
    """Bytes per row of the messages of ``phase``, as ``core_attention.message`` lays them out."""
    if phase is Phase.FORWARD:
        return RowBytes(
            q_request=shape.q_row_bytes,
            kv_request=shape.kv_row_bytes,
            q_reply=shape.o_row_bytes + shape.lse_row_bytes,
            kv_reply=0,
        )
    return RowBytes(
        q_request=shape.q_row_bytes + shape.o_row_bytes + 2 * shape.lse_row_bytes,
        kv_request=shape.kv_row_bytes,
        q_reply=shape.q_row_bytes,
        kv_reply=shape.kv_row_bytes,
    )


def forecast(
    manifest: Manifest,
    tasks: TaskTable,
    servers: Sequence[PlanningServer],
    shape: AttentionShape,
    phase: Phase,
) -> PhaseForecast:
    """The forecast of ``phase`` under ``tasks``.

    ``home_seconds`` uses the profile and speed of each rank's in-place server; for a rank without
    one, the profile of the first server.

    Args:
        manifest: the whole step.
        tasks: its CA-tasks of ``phase``.
        servers: what the tasks' server indices mean.
        shape: for the bytes.
        phase: for seconds and bytes.

    Raises:
        PlanError: as :func:`~control_plane.planner.fleet.build_fleet`.
    """
    fleet = build_fleet(servers, manifest.n_ranks)
    return forecast_fleet(manifest, tasks, fleet, segment_seconds(manifest, fleet), shape, phase)


def segment_seconds(manifest: Manifest, fleet: Fleet) -> Float64Array:
    """``[2, n_segments]`` seconds of every segment at home, forward and backward, by the profile
    and speed of its rank's in-place server; by the first server's profile if there is none."""
    seconds = np.empty((2, manifest.n_segments))
    _fill_segment_seconds(
        manifest.segment_offset, manifest.segment_length, manifest.segment_rank, fleet, seconds
    )
    return seconds


def forecast_fleet(
    manifest: Manifest,
    tasks: TaskTable,
    fleet: Fleet,
    at_home: Float64Array,
    shape: AttentionShape,
    phase: Phase,
) -> PhaseForecast:
    """The same for servers that are columns already.

    Args:
        at_home: of :func:`segment_seconds`.
    """
    phase_index, per_row = PHASE_INDEX[phase], row_bytes(shape, phase)
    home_seconds = np.zeros((manifest.n_nano_batches, manifest.n_ranks))
    size = (manifest.n_nano_batches, len(fleet.rank))
    seconds = np.zeros(size)
    q_rows, kv_rows, q_moved, kv_moved = (np.zeros(size, dtype=np.int64) for _ in range(4))
    _add_home_seconds(
        manifest.segment_document,
        manifest.segment_rank,
        manifest.document_nano_batch,
        at_home[phase_index],
        home_seconds,
    )
    _add_tasks(
        *_task_columns(tasks),
        manifest.first_segment,
        *_segment_columns(manifest),
        fleet,
        phase_index,
        at_home[phase_index],
        seconds,
        q_rows,
        kv_rows,
        q_moved,
        kv_moved,
    )
    return PhaseForecast(
        home_seconds=home_seconds,
        seconds=seconds,
        q_rows=q_rows,
        kv_rows=kv_rows,
        bytes_in=q_moved * per_row.q_request + kv_moved * per_row.kv_request,
        bytes_out=q_moved * per_row.q_reply + kv_moved * per_row.kv_reply,
    )


def pair_bytes(
    manifest: Manifest,
    tasks: TaskTable,
    servers: Sequence[PlanningServer],
    shape: AttentionShape,
    phase: Phase,
    nano_batch: int,
) -> tuple[Int64Array, Int64Array]:
    """Bytes between every rank and every server in one tick of ``nano_batch``.

    Returns:
        Two arrays ``[n_ranks, n_servers]``: the bytes of the requests (rank to server) and of the
        replies (server to rank). A rank and its own in-place server exchange nothing.
    """
    fleet, per_row = build_fleet(servers, manifest.n_ranks), row_bytes(shape, phase)
    q_moved = np.zeros((manifest.n_ranks, len(servers)), dtype=np.int64)
    kv_moved = np.zeros_like(q_moved)
    _add_pairs(
        *_task_columns(tasks),
        manifest.first_segment,
        *_segment_columns(manifest),
        fleet,
        nano_batch,
        q_moved,
        kv_moved,
    )
    requests = q_moved * per_row.q_request + kv_moved * per_row.kv_request
    return requests, q_moved * per_row.q_reply + kv_moved * per_row.kv_reply


_FiveColumns = tuple[Int64Array, Int64Array, Int64Array, Int64Array, Int64Array]


def _segment_columns(manifest: Manifest) -> _FiveColumns:
    return (
        manifest.segment_document,
        manifest.segment_offset,
        manifest.segment_length,
        manifest.segment_rank,
        manifest.document_nano_batch,
    )


def _task_columns(tasks: TaskTable) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    return tasks.document, tasks.q_begin, tasks.q_end, tasks.server


REMEMBERED_TOKENS = 1 << 14
"""Rates of whole documents up to this length are looked up once a length: a step has many of the
same."""


@compiled
def _fill_segment_seconds(
    segment_offset: Int64Array,
    segment_length: Int64Array,
    segment_rank: Int64Array,
    fleet: Fleet,
    seconds: Float64Array,
) -> None:
    # By length: for which profile, and the rates, forward and backward.
    known = np.full(REMEMBERED_TOKENS, -1, dtype=np.int64)
    rates = np.empty((REMEMBERED_TOKENS, 2))
    for i in range(len(segment_offset)):
        server = fleet.server_of_rank[segment_rank[i]]
        profile, speed = fleet.profile[max(server, 0)], 1.0
        if server >= 0 and fleet.speed[server] > 0:
            speed = fleet.speed[server]
        begin, length = segment_offset[i], segment_length[i]
        end = begin + length
        if end < REMEMBERED_TOKENS and begin == 0:
            if known[end] != profile:
                known[end] = profile
                rates[end] = pair_seconds_of_both(fleet.tables, profile, float(end), float(end))
            forward, backward = rates[end, FORWARD], rates[end, BACKWARD]
        else:
            forward, backward = pair_seconds_of_both(
                fleet.tables, profile, float(length), float(end)
            )
        pairs = causal_pairs(begin, end) / speed
        seconds[FORWARD, i] = pairs * forward
        seconds[BACKWARD, i] = pairs * backward


@compiled
def _add_home_seconds(
    segment_document: Int64Array,
    segment_rank: Int64Array,
    document_nano_batch: Int64Array,
    at_home: Float64Array,
    home_seconds: Float64Array,
) -> None:
    # Neighbours mostly share a rank: their sum is kept out of memory until it is complete.
    nano = rank = 0
    total = 0.0
    for i in range(len(segment_document)):
        its_nano = document_nano_batch[segment_document[i]]
        if segment_rank[i] != rank or its_nano != nano:
            home_seconds[nano, rank] += total
            nano, rank, total = its_nano, segment_rank[i], 0.0
        total += at_home[i]
    home_seconds[nano, rank] += total


@compiled
def _add_tasks(
    document: Int64Array,
    q_begin: Int64Array,
    q_end: Int64Array,
    server: Int64Array,
    first_segment: Int64Array,
    segment_document: Int64Array,
    segment_offset: Int64Array,
    segment_length: Int64Array,
    segment_rank: Int64Array,
    document_nano_batch: Int64Array,
    fleet: Fleet,
    phase: int,
    at_home: Float64Array,
    seconds: Float64Array,
    q_rows: Int64Array,
    kv_rows: Int64Array,
    q_moved: Int64Array,
    kv_moved: Int64Array,
) -> None:
    """Walks the tasks from last to first, so that the first task of a server seen in a document is
    the one that reads the most keys: its keys are all that the server needs of the document."""
    last_document = np.full(len(fleet.rank), -1, dtype=np.int64)
    segment = len(segment_document) - 1
    # Neighbours mostly share a server: their sums are kept out of memory until they are complete.
    at_nano = at_server = 0
    busy, q, kv = 0.0, 0, 0
    for i in range(len(document) - 1, -1, -1):
        d, s, begin, end = document[i], server[i], q_begin[i], q_end[i]
        nano = document_nano_batch[d]
        if s != at_server or nano != at_nano:
            seconds[at_nano, at_server] += busy
            q_rows[at_nano, at_server] += q
            kv_rows[at_nano, at_server] += kv
            at_nano, at_server = nano, s
            busy, q, kv = 0.0, 0, 0
        while segment_document[segment] > d or segment_offset[segment] > begin:
            segment -= 1
        rank = fleet.rank[s]
        is_home = segment_rank[segment] == rank
        q += end - begin
        if is_home and end - begin == segment_length[segment] and fleet.speed[s] > 0.0:
            busy += at_home[segment]
        elif fleet.speed[s] > 0.0:
            busy += task_seconds(fleet.tables, fleet.profile[s], phase, begin, end) / fleet.speed[s]
        else:
            busy = np.inf
        if not is_home:
            q_moved[nano, s] += end - begin
        if last_document[s] == d:
            continue
        last_document[s] = d
        kv += end
        if is_home and segment == first_segment[d]:
            # All keys are at home.
            continue
        kv_moved[nano, s] += end
        if rank >= 0:
            for j in range(first_segment[d], segment + 1):
                if segment_rank[j] == rank:
                    kv_moved[nano, s] -= min(segment_length[j], end - segment_offset[j])
    if len(document):
        seconds[at_nano, at_server] += busy
        q_rows[at_nano, at_server] += q
        kv_rows[at_nano, at_server] += kv


@compiled
def _add_pairs(
    document: Int64Array,
    q_begin: Int64Array,
    q_end: Int64Array,
    server: Int64Array,
    first_segment: Int64Array,
    segment_document: Int64Array,
    segment_offset: Int64Array,
    segment_length: Int64Array,
    segment_rank: Int64Array,
    document_nano_batch: Int64Array,
    fleet: Fleet,
    nano_batch: int,
    q_moved: Int64Array,
    kv_moved: Int64Array,
) -> None:
    last_document = np.full(len(fleet.rank), -1, dtype=np.int64)
    segment = len(segment_document) - 1
    for i in range(len(document) - 1, -1, -1):
        d, s, begin, end = document[i], server[i], q_begin[i], q_end[i]
        if document_nano_batch[d] != nano_batch:
            continue
        while segment_document[segment] > d or segment_offset[segment] > begin:
            segment -= 1
        if segment_rank[segment] != fleet.rank[s]:
            q_moved[segment_rank[segment], s] += end - begin
        if last_document[s] == d:
            continue
        last_document[s] = d
        for j in range(first_segment[d], segment + 1):
            if segment_rank[j] != fleet.rank[s]:
                kv_moved[segment_rank[j], s] += min(segment_length[j], end - segment_offset[j])
