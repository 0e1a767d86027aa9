"""The units of one half of the microbatches, planned in turns: each on top of what runs beside it.

All of it is one call of compiled code, which other threads can run beside: a step has hundreds of
units, and halves have nothing to do with each other. Arrays of slots are of one half.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from control_plane.planner.board import BEGIN, END, SEGMENT, SERVER, Segments
from control_plane.planner.chunk import CutRules
from control_plane.planner.compiled import BoolArray, compiled, compiled_into, compiled_leaf
from control_plane.planner.costs import BACKWARD, FORWARD
from control_plane.planner.fleet import Fleet
from control_plane.planner.forecast import (
    KV_ROWS,
    Q_ROWS,
    AtHome,
    Carried,
    Places,
    add_tasks,
    carried_of,
)
from control_plane.planner.links import Links
from control_plane.planner.phase import Outcome, plan_phase
from control_plane.planner.survey import Columns, HomeWork, is_divided, look
from control_plane.planner.tasks import Cuts, write_tasks
from control_plane.planner.timetable import Timetable
from core_attention.arrays import Float64Array, Int64Array, frozen
from core_attention.manifest import Manifest


class Step(NamedTuple):
    """The segments of a manifest.

    Attributes:
        bounds: ``[n_nano_batches + 1]`` first segment of every nano-batch, then their number.
        document, begin, length, rank: ``[n_segments]``.
        document_length: ``[n_documents]``.
        carried: keys that documents carry over from the first half to the second.
        divided: whether any segment is not its whole document.
        half, n_halves: which of the nano-batches of each microbatch are planned.
    """

    bounds: Int64Array
    document: Int64Array
    begin: Int64Array
    length: Int64Array
    rank: Int64Array
    document_length: Int64Array
    carried: Carried
    divided: bool
    half: int
    n_halves: int


def step_of(manifest: Manifest, half: int, n_halves: int) -> Step:
    """The columns of ``manifest``."""
    nano_batches = np.arange(manifest.n_nano_batches + 1)
    return Step(
        frozen(manifest.first_segment[manifest.document_nano_batch.searchsorted(nano_batches)]),
        manifest.segment_document,
        manifest.segment_offset,
        manifest.segment_length,
        manifest.segment_rank,
        manifest.document_length,
        carried_of(manifest),
        is_divided(manifest),
        half,
        n_halves,
    )


class Desk(NamedTuple):
    """The place of one unit's segments while it is planned: ``[room]``, of which the unit takes
    what it needs. Columns that are compiled as read-only are here twice, to be written and to be
    read: for other kinds of arrays all code would be compiled again.

    Attributes:
        document: counted from the unit's first.
        begin, end, length, rank, whole: of the segments.
        first: first segment of each document, then their number.
        first_carried, carried_length, carried_rank: runs of keys that documents carry over, as in
            :class:`~control_plane.planner.forecast.Carried`.
        forward, backward: seconds at home.
        read_document, read_begin, read_end, read_length, read_rank, read_first,
        read_first_carried, read_carried_length, read_carried_rank: the same memory.
    """

    document: Int64Array
    begin: Int64Array
    end: Int64Array
    length: Int64Array
    rank: Int64Array
    first: Int64Array
    first_carried: Int64Array
    carried_length: Int64Array
    carried_rank: Int64Array
    whole: BoolArray
    forward: Float64Array
    backward: Float64Array
    read_document: Int64Array
    read_begin: Int64Array
    read_end: Int64Array
    read_length: Int64Array
    read_rank: Int64Array
    read_first: Int64Array
    read_first_carried: Int64Array
    read_carried_length: Int64Array
    read_carried_rank: Int64Array


def make_desk(room: int, room_carried: int) -> Desk:
    """A desk for units of at most ``room`` segments and ``room_carried`` runs of carried keys;
    memory that none needs is never touched."""
    document, begin, end, length, rank, first, first_carried = np.empty(
        (7, room + 1), dtype=np.int64
    )
    carried_length, carried_rank = np.empty((2, room_carried), dtype=np.int64)
    own = (document, begin, end, length, rank, first, first_carried, carried_length, carried_rank)
    return Desk(
        *own,
        np.empty(room, dtype=np.bool_),
        np.empty(room),
        np.empty(room),
        *(frozen(column.view()) for column in own),
    )


class Bounds(NamedTuple):
    """The inputs common to all units; pairs are of the forward and the backward phase.

    Attributes:
        rules: where pieces may be cut.
        links: what a byte costs.
        tolerance: share by which servers may exceed the target load.
        n_variants: plans to choose from.
    """

    rules: tuple[CutRules, CutRules]
    links: Links
    tolerance: float
    n_variants: int


class Sheet(NamedTuple):
    """The state of a half; filled in while its units are planned. Seconds of slots are of all
    layers, the others in the mean of the job's.

    Attributes:
        base_seconds: ``[n_slots, n_servers]`` beside attention.
        home_seconds: ``[n_slots, n_ranks]`` busy if nothing moved.
        seconds: ``[n_slots, n_servers]`` busy, with the units so far.
        rows: ``[n_slots, n_servers]`` q plus k/v rows that they hold.
        layer_home: ``[2, n_microbatches, n_ranks]`` attention at home, in each phase.
        layer_seconds: ``[2, n_microbatches, n_servers]`` the same under the plan.
        layer_rows: ``[2, n_microbatches, 4, n_servers]`` of ``forecast.TaskSums``.
        moved_to: ``[2, n_segments]`` of ``tasks.Cuts``, by segments of the manifest; ``[2, 0]``
            where no segment is homeless.
        outcomes: ``[n_units, OUTCOME_FIELDS]``.
        counts: ``[2, 2]`` of each phase, pieces and tasks so far.
    """

    base_seconds: Float64Array
    home_seconds: Float64Array
    seconds: Float64Array
    rows: Int64Array
    layer_home: Float64Array
    layer_seconds: Float64Array
    layer_rows: Int64Array
    moved_to: Int64Array
    outcomes: Float64Array
    counts: Int64Array


OUTCOME_FIELDS = len(Outcome._fields)
PIECES, TASKS = 0, 1
"""The columns of ``Sheet.counts``."""


def empty_sheet(table: Timetable, n_servers: int, moved_to: Int64Array) -> Sheet:
    """An empty sheet. ``moved_to``: all -1."""
    n_slots, n_ranks = len(table.microbatch), len(table.pipeline_rank)
    n_microbatches = table.unit_of.shape[2]
    return Sheet(
        base_seconds=np.zeros((n_slots, n_servers)),
        home_seconds=np.zeros((n_slots, n_ranks)),
        seconds=np.zeros((n_slots, n_servers)),
        rows=np.zeros((n_slots, n_servers), dtype=np.int64),
        layer_home=np.zeros((2, n_microbatches, n_ranks)),
        layer_seconds=np.zeros((2, n_microbatches, n_servers)),
        layer_rows=np.zeros((2, n_microbatches, 4, n_servers), dtype=np.int64),
        moved_to=moved_to,
        outcomes=np.zeros((len(table.phase), OUTCOME_FIELDS)),
        counts=np.zeros((2, 2), dtype=np.int64),
    )


def outcome_of(row: list[float]) -> Outcome:
    """From a row of ``Sheet.outcomes``."""
    target_load, scale, ratio, raised, excess, busiest, spent_bytes, cost, *counts = row
    n_chunks, segment, end, server = map(int, counts)
    return Outcome(
        target_load,
        scale,
        ratio,
        raised,
        excess,
        busiest,
        spent_bytes,
        cost,
        n_chunks,
        segment,
        end,
        server,
    )


class Queue(NamedTuple):
    """The segments of a half by unit.

    Attributes:
        bounds: ``[n_units * n_microbatches + 1]`` where those of each unit and microbatch begin in
            ``segment``, then their number.
        segment: indices in the manifest, in ascending order in each unit; each one is there once
            forward and once backward.
        most: segments of the largest unit.
    """

    bounds: Int64Array
    segment: Int64Array
    most: int


@compiled
def plan_in_rounds(
    step: Step, table: Timetable, fleet: Fleet, bounds: Bounds, desk: Desk, sheet: Sheet
) -> tuple[Int64Array, Int64Array, int, int]:
    """Plans all units of a half, and fills in ``sheet``.

    Returns:
        ``[n, 4]`` the pieces of each phase as in ``tasks.Cuts``, unit after unit, by segments of
        the manifest; and the unit of which something fits nowhere, -1 if there is none, with the
        first of its segments that its outcome says is stuck.
    """
    n_microbatches = table.unit_of.shape[2]
    queue = _queue_up(step, table)
    if not step.divided:
        _lay_whole_documents(desk, queue.most)
    tokens = np.zeros((n_microbatches, len(table.pipeline_rank)))
    _compute_beside(step, table, fleet, tokens, sheet)
    forward = np.empty((4 * len(fleet.rank), 4), dtype=np.int64)
    backward, ratio = forward.copy(), np.zeros(2)
    for unit in range(len(table.phase)):
        runs = queue.bounds[unit * n_microbatches : (unit + 1) * n_microbatches + 1]
        its = queue.segment[runs[0] : runs[n_microbatches]]
        if len(its) == 0:
            continue
        phase = table.phase[unit]
        segments, home = _lay_out(step, its, fleet, desk, phase)
        based = _beside(table, unit, fleet, sheet)
        cuts, outcome = plan_phase(
            segments,
            home,
            based,
            bounds.rules[phase],
            bounds.links,
            bounds.tolerance,
            bounds.n_variants,
            ratio[phase],
        )
        _note_outcome(outcome, sheet.outcomes[unit])
        if outcome.stuck_segment >= 0 or outcome.stuck_server >= 0:
            return forward, backward, unit, its[max(outcome.stuck_segment, 0)]
        ratio[phase] = outcome.work_ratio
        carried = _carried_by(step, its, desk)
        _enter(table, unit, runs, segments, carried, home, desk, based, cuts, sheet)
        if phase == BACKWARD:
            backward = _keep(cuts, its, backward, sheet.counts[phase], sheet.moved_to[phase])
        else:
            forward = _keep(cuts, its, forward, sheet.counts[phase], sheet.moved_to[phase])
    n_pieces = sheet.counts[:, PIECES]
    return forward[: n_pieces[FORWARD]], backward[: n_pieces[BACKWARD]], -1, -1


@compiled_into
def _queue_up(step: Step, table: Timetable) -> Queue:
    """Sort by counting: unit, then microbatch, then place in the manifest."""
    n_microbatches, n_units = table.unit_of.shape[2], len(table.phase)
    bounds = np.zeros(n_units * n_microbatches + 2, dtype=np.int64)
    _enqueue(step, table, bounds[2:], np.empty(0, dtype=np.int64))
    bounds = np.cumsum(bounds)
    segment = np.empty(bounds[len(bounds) - 1], dtype=np.int64)
    # Where each begins becomes where it ends, which is where the next one begins.
    _enqueue(step, table, bounds[1:], segment)
    most = 0
    for unit in range(n_units):
        low, high = bounds[unit * n_microbatches], bounds[(unit + 1) * n_microbatches]
        most = max(most, high - low)
    return Queue(bounds, segment, most)


@compiled_leaf
def _enqueue(step: Step, table: Timetable, begin: Int64Array, segment: Int64Array) -> None:
    """Writes the segments of each unit and microbatch, from ``begin`` on, which moves along; where
    ``segment`` is empty they are counted only."""
    n_microbatches, writes = table.unit_of.shape[2], len(segment) > 0
    for microbatch in range(n_microbatches):
        nano_batch = microbatch * step.n_halves + step.half
        for i in range(step.bounds[nano_batch], step.bounds[nano_batch + 1]):
            place = table.pipeline_rank[step.rank[i]]
            for phase in range(2):
                at = table.unit_of[phase, place, microbatch] * n_microbatches + microbatch
                if writes:
                    segment[begin[at]] = i
                begin[at] += 1


@compiled_leaf
def _lay_whole_documents(desk: Desk, most: int) -> None:
    """The columns common to all units whose segments are whole documents."""
    for k in range(most):
        desk.document[k], desk.begin[k], desk.first[k], desk.whole[k] = k, 0, k, True
    desk.first[most] = most


@compiled_leaf
def _compute_beside(
    step: Step, table: Timetable, fleet: Fleet, tokens: Float64Array, sheet: Sheet
) -> None:
    """The work beside attention in each slot: an equal part of it in every half, however
    the documents lie in them. A rank runs the halves of a microbatch in turns, so it is busy for
    their sum, and attention that made up for few tokens in one half would be too much in the other.

    Args:
        tokens: ``[n_microbatches, n_ranks]`` zeros.
    """
    for microbatch in range(len(tokens)):
        first = microbatch * step.n_halves
        for i in range(step.bounds[first], step.bounds[first + step.n_halves]):
            tokens[microbatch, step.rank[i]] += step.length[i] / step.n_halves
    for slot in range(len(table.microbatch)):
        for rank in range(len(table.pipeline_rank)):
            place = table.pipeline_rank[rank]
            seconds = tokens[table.microbatch[slot, place], rank] * table.token_seconds[slot, place]
            sheet.home_seconds[slot, rank] = seconds
            server = fleet.server_of_rank[rank]
            if server >= 0:
                sheet.base_seconds[slot, server] = seconds
                sheet.seconds[slot, server] = seconds


@compiled_into
def _lay_out(
    step: Step, its: Int64Array, fleet: Fleet, desk: Desk, phase: int
) -> tuple[Segments, HomeWork]:
    """The segments ``its`` on the desk, and what they take."""
    n, n_documents = len(its), len(its)
    if step.divided:
        n_documents = _write_divided(step, its, desk)
    else:
        _write_whole(step, its, desk)
    segments = Segments(
        desk.read_document[:n],
        desk.read_begin[:n],
        desk.read_end[:n],
        desk.read_rank[:n],
        desk.whole[:n],
        step.divided,
        desk.read_first[: n_documents + 1],
    )
    forward, backward = desk.forward[:n], desk.backward[:n]
    seconds = np.zeros((2, len(fleet.server_of_rank)))
    longest = np.zeros(len(fleet.server_of_rank), dtype=np.int64)
    columns = Columns(segments.begin, segments.end, segments.rank, step.divided, forward, backward)
    mean_end = look(columns, fleet, seconds, longest)
    return segments, HomeWork(backward if phase else forward, seconds[phase], longest, mean_end)


@compiled_leaf
def _write_whole(step: Step, its: Int64Array, desk: Desk) -> None:
    """Writes what is not the same of every unit."""
    for k in range(len(its)):
        desk.end[k], desk.rank[k] = step.length[its[k]], step.rank[its[k]]


@compiled_leaf
def _write_divided(step: Step, its: Int64Array, desk: Desk) -> int:
    """Writes columns of segments that may be parts of documents; returns how many documents."""
    n_documents, last = 0, -1
    for k in range(len(its)):
        i = its[k]
        document = step.document[i]
        if document != last:
            desk.first[n_documents] = k
            n_documents += 1
            last = document
        desk.document[k] = n_documents - 1
        desk.begin[k], desk.length[k] = step.begin[i], step.length[i]
        desk.end[k], desk.rank[k] = step.begin[i] + step.length[i], step.rank[i]
        desk.whole[k] = step.length[i] == step.document_length[document]
    desk.first[n_documents] = len(its)
    return n_documents


@compiled_into
def _carried_by(step: Step, its: Int64Array, desk: Desk) -> Carried:
    """The keys that the documents of ``its`` carry over, on the desk."""
    if len(step.carried.first) == 0:
        none = desk.read_first[:0]
        return Carried(none, none, none)
    n_documents, n = _write_carried(step, its, desk)
    return Carried(
        desk.read_first_carried[: n_documents + 1],
        desk.read_carried_length[:n],
        desk.read_carried_rank[:n],
    )


@compiled_leaf
def _write_carried(step: Step, its: Int64Array, desk: Desk) -> tuple[int, int]:
    """Returns how many documents there are, and runs of keys."""
    n_documents, n, last = 0, 0, -1
    for k in range(len(its)):
        document = step.document[its[k]]
        if document == last:
            continue
        desk.first_carried[n_documents] = n
        n_documents += 1
        last = document
        for j in range(step.carried.first[document], step.carried.first[document + 1]):
            desk.carried_length[n] = step.carried.length[j]
            desk.carried_rank[n] = step.carried.rank[j]
            n += 1
    desk.first_carried[n_documents] = n
    return n_documents, n


@compiled_into
def _beside(table: Timetable, unit: int, fleet: Fleet, sheet: Sheet) -> Fleet:
    """The servers with what they compute in one layer of ``unit`` besides it, and the rows that
    they can hold of it."""
    base, rows = np.zeros((2, len(fleet.rank))), fleet.capacity_rows.copy()
    _add_beside(table, unit, fleet, sheet, base[table.phase[unit]], rows)
    return Fleet(
        fleet.rank,
        fleet.server_of_rank,
        fleet.profile,
        fleet.speed,
        rows,
        fleet.is_limited,
        fleet.receives,
        base,
        True,
        fleet.tables,
        fleet.uncut_rates,
    )


@compiled_leaf
def _add_beside(
    table: Timetable,
    unit: int,
    fleet: Fleet,
    sheet: Sheet,
    base: Float64Array,
    rows: Int64Array,
) -> None:
    """Adds the seconds of the unit's slots to ``base``, and takes the rows that are held in the
    fullest of them from ``rows``."""
    for span in range(table.first_span[unit], table.first_span[unit + 1]):
        for slot in range(table.spans[span, 0], table.spans[span, 1]):
            for server in range(len(base)):
                base[server] += sheet.seconds[slot, server]
            if fleet.is_limited:
                for server in range(len(base)):
                    left = fleet.capacity_rows[server] - sheet.rows[slot, server]
                    rows[server] = max(min(rows[server], left), 0)
    for server in range(len(base)):
        # What has no layers is planned as if it had one; it adds nothing to its slots.
        base[server] /= max(table.layers[unit], 1)


@compiled_into
def _enter(
    table: Timetable,
    unit: int,
    runs: Int64Array,
    segments: Segments,
    carried: Carried,
    home: HomeWork,
    desk: Desk,
    fleet: Fleet,
    cuts: Cuts,
    sheet: Sheet,
) -> None:
    """Adds the plan of ``unit`` to the sheet.

    Args:
        runs: ``[n_microbatches + 1]`` bounds of its microbatches' segments.
    """
    microbatches = np.flatnonzero(runs[1:] > runs[:-1])
    bounds = np.append(runs[microbatches], runs[len(runs) - 1]) - runs[0]
    tasks = np.empty((4, cuts.n_tasks), dtype=np.int64)
    document, q_begin, q_end, server = tasks[0], tasks[1], tasks[2], tasks[3]
    write_tasks(cuts, segments, fleet, document, q_begin, q_end, server)
    places = Places(
        segments.first_of_document,
        segments.document,
        segments.begin,
        desk.read_length[: len(segments.end)] if segments.divided else segments.end,
        segments.rank,
        carried,
    )
    at_home = AtHome(bounds, home.seconds, segments.end, segments.whole, segments.divided)
    seconds = np.zeros((len(microbatches), len(fleet.rank)))
    rows = np.zeros((len(microbatches), 4, len(fleet.rank)), dtype=np.int64)
    phase = table.phase[unit]
    if not add_tasks(
        document, q_begin, q_end, server, places, at_home, fleet, phase, seconds, rows
    ):
        raise AssertionError("the tasks of a unit are not valid")
    _add_to_layers(table, unit, microbatches, home, seconds, rows, sheet)
    if fleet.is_limited:
        _hold_in_slots(table, unit, rows, sheet)
    _add_to_slots(table, unit, home, seconds, sheet)


@compiled_leaf
def _add_to_layers(
    table: Timetable,
    unit: int,
    microbatches: Int64Array,
    home: HomeWork,
    seconds: Float64Array,
    rows: Int64Array,
    sheet: Sheet,
) -> None:
    """Adds what ``unit`` takes in the mean of the job's layers; rows held count in full."""
    phase, share = table.phase[unit], table.layers[unit] / table.max_layers
    for k in range(len(microbatches)):
        microbatch = microbatches[k]
        for server in range(seconds.shape[1]):
            sheet.layer_seconds[phase, microbatch, server] += seconds[k, server] * share
        for kind in range(4):
            part = 1.0 if kind in (Q_ROWS, KV_ROWS) else share
            for server in range(rows.shape[2]):
                count = round(rows[k, kind, server] * part)
                sheet.layer_rows[phase, microbatch, kind, server] += count
        # Of each rank, a unit has one microbatch at most.
        for rank in range(len(home.rank_seconds)):
            if table.unit_of[phase, table.pipeline_rank[rank], microbatch] == unit:
                its = home.rank_seconds[rank] * share
                sheet.layer_home[phase, microbatch, rank] += its


@compiled_leaf
def _hold_in_slots(table: Timetable, unit: int, rows: Int64Array, sheet: Sheet) -> None:
    """Adds the rows that servers hold of ``unit`` to the slots that it runs in."""
    for span in range(table.first_span[unit], table.first_span[unit + 1]):
        if table.spans[span, 2] == 0:
            continue
        for slot in range(table.spans[span, 0], table.spans[span, 1]):
            for k in range(len(rows)):
                for server in range(rows.shape[2]):
                    held = rows[k, Q_ROWS, server] + rows[k, KV_ROWS, server]
                    sheet.rows[slot, server] += held


@compiled_leaf
def _add_to_slots(
    table: Timetable, unit: int, home: HomeWork, seconds: Float64Array, sheet: Sheet
) -> None:
    """Adds what ``unit`` takes to the slots that it runs in; ``seconds[0]`` becomes the sum of all
    its microbatches."""
    total = seconds[0]
    for k in range(1, len(seconds)):
        for server in range(len(total)):
            total[server] += seconds[k, server]
    for span in range(table.first_span[unit], table.first_span[unit + 1]):
        begin, end, layers = table.spans[span, 0], table.spans[span, 1], table.spans[span, 2]
        part = layers / (end - begin)
        for slot in range(begin, end):
            busy, at_home = sheet.seconds[slot], sheet.home_seconds[slot]
            for server in range(len(total)):
                busy[server] += total[server] * part
            for rank in range(len(at_home)):
                at_home[rank] += home.rank_seconds[rank] * part


@compiled_into
def _keep(
    cuts: Cuts, its: Int64Array, pieces: Int64Array, counts: Int64Array, moved_to: Int64Array
) -> Int64Array:
    """Adds the cuts of segments ``its`` to all ``pieces`` of a phase, which may become larger, and
    to its ``counts`` and ``moved_to``."""
    used = counts[PIECES]
    kept = pieces
    if used + len(cuts.pieces) > len(pieces):
        kept = np.empty((2 * (used + len(cuts.pieces)), 4), dtype=np.int64)
        kept[:used] = pieces[:used]
    _copy_cuts(cuts, its, kept[used:], moved_to)
    counts[PIECES] += len(cuts.pieces)
    counts[TASKS] += cuts.n_tasks
    return kept


@compiled_leaf
def _copy_cuts(cuts: Cuts, its: Int64Array, pieces: Int64Array, moved_to: Int64Array) -> None:
    for k in range(len(cuts.pieces)):
        pieces[k, SEGMENT] = its[cuts.pieces[k, SEGMENT]]
        pieces[k, BEGIN], pieces[k, END] = cuts.pieces[k, BEGIN], cuts.pieces[k, END]
        pieces[k, SERVER] = cuts.pieces[k, SERVER]
    for k in range(len(cuts.moved_to)):
        moved_to[its[k]] = cuts.moved_to[k]


@compiled_leaf
def _note_outcome(outcome: Outcome, row: Float64Array) -> None:
    row[0], row[1], row[2] = outcome.target_load, outcome.scale, outcome.work_ratio
    row[3], row[4], row[5] = outcome.raised, outcome.excess, outcome.busiest
    row[6], row[7], row[8] = outcome.spent_bytes, outcome.spent_cost, outcome.n_chunks
    row[9], row[10], row[11] = outcome.stuck_segment, outcome.stuck_end, outcome.stuck_server
