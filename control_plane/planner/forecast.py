"""Forecasts: what a plan will cost each server in seconds, rows and bytes.

Pure functions of (manifest, tasks, servers, shape). Bytes are those of one tick, one layer: K and V
of a row count once per destination however many tasks read them, and what is at home at its
destination is not counted. Padding between the sections of a message (under 1.5 KiB a message) is
left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from control_plane.planner.compiled import BoolArray, compiled, compiled_leaf
from control_plane.planner.costs import PHASE_INDEX, task_seconds
from control_plane.planner.fleet import Fleet, build_fleet
from control_plane.planner.planning import PlanningServer
from control_plane.planner.survey import Survey, survey
from core_attention.arrays import Float64Array, Int64Array, frozen
from core_attention.ca_task import MaskKind, Phase, TaskTable
from core_attention.errors import PlanError
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
    """
    fleet = build_fleet(servers, manifest.n_ranks)
    return forecast_fleet(manifest, tasks, fleet, survey(manifest, fleet), shape, phase)


def forecast_fleet(
    manifest: Manifest,
    tasks: TaskTable,
    fleet: Fleet,
    found: Survey,
    shape: AttentionShape,
    phase: Phase,
) -> PhaseForecast:
    """The same for servers that are columns already, and segments that were looked at: ``found``
    says what they take at home.
    """
    phase_index = PHASE_INDEX[phase]
    segments = Places(
        manifest.first_segment,
        manifest.segment_document,
        *_segment_columns(manifest),
        carried_of(manifest),
    )
    sums = sum_tasks(tasks, segments, found, fleet, phase_index)
    if sums is None:
        tasks.check(manifest, len(fleet.rank))
        raise AssertionError(f"a task table in which a forecast found a mistake: {tasks}")
    return to_forecast(found.rank_seconds[:, phase_index], sums, shape, phase)


class Carried(NamedTuple):
    """Runs of carried keys.

    Attributes:
        first: ``[n_documents + 1]``; empty where no document of the step carries keys.
        length, rank: ``[n_carried]``.
    """

    first: Int64Array
    length: Int64Array
    rank: Int64Array


def no_carried() -> Carried:
    """The columns of documents that lie in one nano-batch each."""
    return Carried(*(frozen(np.empty(0, dtype=np.int64)) for _ in Carried._fields))


class Places(NamedTuple):
    """The homes of segments, columns of a manifest or like them.

    Attributes:
        first_segment: ``[n_documents + 1]``.
        document, offset, length, rank: ``[n_segments]``.
        carried: keys that documents carry over from an earlier nano-batch.
    """

    first_segment: Int64Array
    document: Int64Array
    offset: Int64Array
    length: Int64Array
    rank: Int64Array
    carried: Carried


class AtHome(NamedTuple):
    """The seconds of segments at home in one phase; see ``Survey``.

    Attributes:
        bounds: ``[n_nano_batches + 1]``.
        seconds, end, whole: ``[n_segments]``.
        divided: whether any is not its whole document.
    """

    bounds: Int64Array
    seconds: Float64Array
    end: Int64Array
    whole: BoolArray
    divided: bool


class TaskSums(NamedTuple):
    """The costs of tasks for the servers.

    Attributes:
        seconds: ``[n_nano_batches, n_servers]`` busy.
        rows: ``[n_nano_batches, 4, n_servers]`` Q_ROWS, KV_ROWS, Q_MOVED and KV_MOVED.
    """

    seconds: Float64Array
    rows: Int64Array

    @classmethod
    def none(cls, n_nano_batches: int, n_servers: int) -> TaskSums:
        """The costs of no tasks."""
        rows = np.zeros((n_nano_batches, 4, n_servers), dtype=np.int64)
        return cls(np.zeros((n_nano_batches, n_servers)), rows)


def sum_tasks(
    tasks: TaskTable, places: Places, found: Survey, fleet: Fleet, phase: int
) -> TaskSums | None:
    """The costs of ``tasks``; None where they break an invariant of ``TaskTable.check``.

    Args:
        tasks: of all the nano-batches that ``found`` has bounds of.
        places: the segments.
        found: what they take at home.
        fleet: what the tasks' server indices mean.
        phase: index of it.
    """
    sums = TaskSums.none(len(found.bounds) - 1, len(fleet.rank))
    at_home = AtHome(found.bounds, found.seconds[phase], found.end, found.whole, found.divided)
    are_valid = add_tasks(*_task_columns(tasks), places, at_home, fleet, phase, *sums)
    return sums if are_valid else None


def to_forecast(
    home_seconds: Float64Array, sums: TaskSums, shape: AttentionShape, phase: Phase
) -> PhaseForecast:
    """The forecast of ``phase`` from what its tasks cost and ``[n_nano_batches, n_ranks]`` seconds
    at home."""
    per_row, rows = row_bytes(shape, phase), sums.rows
    q_moved, kv_moved = rows[:, Q_MOVED], rows[:, KV_MOVED]
    return PhaseForecast(
        home_seconds=home_seconds,
        seconds=sums.seconds,
        q_rows=rows[:, Q_ROWS],
        kv_rows=rows[:, KV_ROWS],
        bytes_in=q_moved * per_row.q_request + kv_moved * per_row.kv_request,
        bytes_out=q_moved * per_row.q_reply + kv_moved * per_row.kv_reply,
    )


def _segment_columns(manifest: Manifest) -> tuple[Int64Array, Int64Array, Int64Array]:
    return manifest.segment_offset, manifest.segment_length, manifest.segment_rank


def carried_of(manifest: Manifest) -> Carried:
    """The columns of ``manifest``."""
    if not manifest.n_carried:
        return no_carried()
    return Carried(manifest.first_carried, manifest.carried_length, manifest.carried_rank)


def _task_columns(tasks: TaskTable) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    if tasks.mask is not MaskKind.CAUSAL:
        raise PlanError(
            f"tasks of mask {tasks.mask.name} are forecast by control_plane.planner.full.forecast"
        )
    return tasks.document, tasks.q_begin, tasks.q_end, tasks.server


Q_ROWS, KV_ROWS, Q_MOVED, KV_MOVED = 0, 1, 2, 3
"""The counts of each server: rows of its tasks, and those of them that come from elsewhere."""


@compiled
def add_tasks(
    document: Int64Array,
    q_begin: Int64Array,
    q_end: Int64Array,
    server: Int64Array,
    places: Places,
    at_home: AtHome,
    fleet: Fleet,
    phase: int,
    seconds: Float64Array,
    rows: Int64Array,
) -> bool:
    """Adds up the tasks' ``seconds`` ``[n_nano_batches, n_servers]`` and ``rows``
    ``[n_nano_batches, 4, n_servers]``; False where they are no valid tasks of the manifest."""
    last_document = np.full(len(fleet.rank), -1, dtype=np.int64)
    others = np.empty(len(document), dtype=np.int64)
    task = 0
    for nano in range(len(seconds)):
        its = slice(at_home.bounds[nano], at_home.bounds[nano + 1])
        task, n_others = _add_unmoved(
            task,
            document,
            q_begin,
            q_end,
            server,
            places.document[its],
            places.offset[its],
            places.rank[its],
            fleet,
            at_home.whole[its],
            at_home.end[its],
            at_home.divided,
            at_home.seconds[its],
            seconds[nano],
            rows[nano],
            others,
        )
        if task < 0:
            return False
        _add_others(
            others[:n_others],
            document,
            q_begin,
            q_end,
            server,
            places.first_segment,
            places.offset,
            places.length,
            places.rank,
            places.carried,
            fleet,
            phase,
            last_document,
            seconds[nano],
            rows[nano],
        )
    return task == len(document)


@compiled_leaf
def _add_unmoved(
    task: int,
    document: Int64Array,
    q_begin: Int64Array,
    q_end: Int64Array,
    server: Int64Array,
    segment_document: Int64Array,
    segment_offset: Int64Array,
    segment_rank: Int64Array,
    fleet: Fleet,
    whole: BoolArray,
    segment_end: Int64Array,
    divided: bool,
    at_home: Float64Array,
    seconds: Float64Array,
    rows: Int64Array,
    others: Int64Array,
) -> tuple[int, int]:
    """Those of a nano-batch's tasks that are whole documents where they are at home: most are.
    Writes the others to ``others``.

    Follows the tasks, from ``task`` on, along the nano-batch's segments, so it sees whether they
    cover each of them once, in order, on servers that exist: as segments partition the documents,
    that is all that ``TaskTable.check`` asks for. It is done here because reading all tasks again
    would take longer than the check itself.

    Returns:
        The first task of the next nano-batch, -1 if these are not valid; and how many others
        there are.
    """
    n_tasks, n_others = len(document), 0
    # Neighbours mostly share a server: their sums are kept out of memory until they are complete.
    at, rank = -1, -1
    busy, tokens = 0.0, 0
    first = segment_document[0] if len(segment_document) else 0
    for segment in range(len(segment_end)):
        d, position, end = first + segment, 0, segment_end[segment]
        if divided:
            d, position = segment_document[segment], segment_offset[segment]
        while position < end:
            if (
                task >= n_tasks
                or document[task] != d
                or q_begin[task] != position
                or q_end[task] <= position
            ):
                return -1, 0
            if server[task] != at or at < 0:
                if at >= 0:
                    seconds[at] += busy
                    rows[Q_ROWS, at] += tokens
                    rows[KV_ROWS, at] += tokens
                at = server[task]
                if at < 0 or at >= len(fleet.rank):
                    return -1, 0
                rank = fleet.rank[at] if fleet.speed[at] > 0.0 else STOPPED
                busy, tokens = 0.0, 0
            length = q_end[task] - position
            if length == end and whole[segment] and segment_rank[segment] == rank:
                busy += at_home[segment]
                tokens += length
            else:
                others[n_others] = task
                n_others += 1
            position += length
            task += 1
        if position > end:
            return -1, 0
    if at >= 0:
        seconds[at] += busy
        rows[Q_ROWS, at] += tokens
        rows[KV_ROWS, at] += tokens
    return task, n_others


@compiled_leaf
def _add_others(
    others: Int64Array,
    document: Int64Array,
    q_begin: Int64Array,
    q_end: Int64Array,
    server: Int64Array,
    first_segment: Int64Array,
    segment_offset: Int64Array,
    segment_length: Int64Array,
    segment_rank: Int64Array,
    carried: Carried,
    fleet: Fleet,
    phase: int,
    last_document: Int64Array,
    seconds: Float64Array,
    rows: Int64Array,
) -> None:
    """All other tasks, those of a document from last to first: so the first one seen of a server
    is the one that reads the most keys, and its keys are all that the server needs of it.

    Args:
        last_document: ``[n_servers]`` of each server's tasks so far, -1 before the first.
    """
    segment = -1
    for k in range(len(others) - 1, -1, -1):
        i = others[k]
        d, s, begin, end = document[i], server[i], q_begin[i], q_end[i]
        if k == len(others) - 1 or document[others[k + 1]] != d:
            segment = first_segment[d + 1] - 1
        while segment_offset[segment] > begin:
            segment -= 1
        rank = fleet.rank[s]
        seconds[s] += _seconds_on(fleet, s, phase, begin, end)
        rows[Q_ROWS, s] += end - begin
        if segment_rank[segment] != rank:
            rows[Q_MOVED, s] += end - begin
        if last_document[s] == d:
            continue
        last_document[s] = d
        rows[KV_ROWS, s] += end
        rows[KV_MOVED, s] += end
        if rank >= 0:
            for j in range(first_segment[d], segment + 1):
                if segment_rank[j] == rank:
                    rows[KV_MOVED, s] -= min(segment_length[j], end - segment_offset[j])
            if len(carried.first):
                for j in range(carried.first[d], carried.first[d + 1]):
                    if carried.rank[j] == rank:
                        rows[KV_MOVED, s] -= carried.length[j]


STOPPED = -2
"""Instead of the rank of a server whose speed is 0: no segment is at home there."""


@compiled_leaf
def _seconds_on(fleet: Fleet, server: int, phase: int, begin: int, end: int) -> float:
    """Seconds of a task on a server; infinite if its speed is 0."""
    if fleet.speed[server] == 0.0:
        return math.inf
    seconds = task_seconds(fleet.tables, fleet.profile[server], phase, begin, end)
    return seconds / float(fleet.speed[server])
