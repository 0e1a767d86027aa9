"""Idle-aware plans of pipelines: slot after slot, each on top of what runs beside it.

In a slot of a schedule some ranks run forwards, others backwards, and some idle. Documents that run
in the same slots are planned together, as one nano-batch; the base load of a server is what its
rank computes beside attention in these slots, and the attention that was planned for them before.
So who idles takes more. The plan of a step is the tasks of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from control_plane.planner import explain
from control_plane.planner.board import Segments
from control_plane.planner.bounds import links_of, n_variants, rules_of
from control_plane.planner.costs import BACKWARD, FORWARD, PHASE_INDEX
from control_plane.planner.fleet import Fleet, build_fleet
from control_plane.planner.forecast import TaskSums, to_forecast
from control_plane.planner.planning import (
    NO_BASE,
    PlanningOptions,
    PlanningServer,
    refuse_carried_keys,
)
from control_plane.planner.rounds import (
    TASKS,
    Bounds,
    Sheet,
    Step,
    empty_sheet,
    make_desk,
    outcome_of,
    plan_in_rounds,
    step_of,
)
from control_plane.planner.side_by_side import threads
from control_plane.planner.survey import is_divided
from control_plane.planner.tasks import Cuts, write_tasks_of_pieces
from control_plane.planner.timetable import Timetable, timetable
from core_attention.arrays import Int64Array, frozen
from core_attention.ca_task import MaskKind, Phase, TaskTable
from core_attention.errors import PlanError
from core_attention.manifest import Manifest
from core_attention.pipelining import Pipelining
from core_attention.plan import Plan, PlanVerdict, SlotForecast
from core_attention.shape import AttentionShape


def plan_slots(
    manifest: Manifest,
    servers: Sequence[PlanningServer],
    shape: AttentionShape,
    options: PlanningOptions,
    *,
    epoch: int = 0,
) -> Plan:
    """Plans one step of pipelines; see :class:`~control_plane.planner.planning.Planner`."""
    pipelining = options.pipelining
    assert pipelining is not None
    n_halves = _check_options(manifest, servers, options, pipelining)
    table = timetable(pipelining)
    if is_divided(manifest):
        _check_documents(manifest, table, n_halves)
    fleet = build_fleet(servers, manifest.n_ranks)
    bounds = Bounds(
        (rules_of(shape, Phase.FORWARD, options), rules_of(shape, Phase.BACKWARD, options)),
        links_of(servers, fleet, options),
        float(options.tolerance),
        n_variants(len(servers)),
    )
    # Of homeless segments, and there are none where every rank has a server that runs.
    at_home = (fleet.server_of_rank >= 0).all() and (fleet.speed > 0.0).all()
    moved_to = np.full((2, 0 if at_home else manifest.n_segments), -1, dtype=np.int64)
    with threads(n_halves) as run:
        halves = run(
            lambda half: _plan_half(
                step_of(manifest, half, n_halves), table, fleet, bounds, moved_to
            ),
            range(n_halves),
        )
        _check_halves(halves, manifest, servers, fleet, table, bounds)
        tables = run(lambda at: _tasks(halves, manifest, fleet, moved_to, at), (FORWARD, BACKWARD))
    slots = SlotForecast(
        home_seconds=np.stack([half.sheet.home_seconds for half in halves]),
        base_seconds=np.stack([half.sheet.base_seconds for half in halves]),
        seconds=np.stack([half.sheet.seconds for half in halves]),
    )
    forecasts = [
        to_forecast(
            _by_nano_batch([half.sheet.layer_home[at] for half in halves]),
            TaskSums(
                _by_nano_batch([half.sheet.layer_seconds[at] for half in halves]),
                _by_nano_batch([half.sheet.layer_rows[at] for half in halves]),
            ),
            shape,
            phase,
        )
        for phase, at in PHASE_INDEX.items()
    ]
    outcomes = [outcome_of(row) for half in halves for row in half.sheet.outcomes.tolist()]
    return Plan(
        manifest=manifest,
        epoch=epoch,
        servers=tuple([server.server for server in servers]),
        forward=tables[FORWARD],
        backward=tables[BACKWARD],
        mask=MaskKind.CAUSAL,
        planner="balanced",
        reason=explain.reason_of_slots(servers, pipelining, slots, outcomes, options),
        verdict=PlanVerdict.of_imbalance(slots.step_imbalance, options.tolerance),
        forward_forecast=forecasts[FORWARD],
        backward_forecast=forecasts[BACKWARD],
        slots=slots,
        tasks_are_valid=True,  # each unit's are, and every document is in one
    )


def _check_options(
    manifest: Manifest,
    servers: Sequence[PlanningServer],
    options: PlanningOptions,
    pipelining: Pipelining,
) -> int:
    """Returns the nano-batches of each microbatch."""
    if len(pipelining.pipeline_ranks) != manifest.n_ranks:
        raise PlanError(
            f"pipeline_ranks names {len(pipelining.pipeline_ranks)} ranks; the step has "
            f"{manifest.n_ranks}"
        )
    based = [server for server in servers if server.base_seconds != NO_BASE]
    if based:
        raise PlanError(
            f"server {based[0].server.server_id}: base_seconds are {based[0].base_seconds}; of "
            "pipelines the schedule says them: leave them out"
        )
    schedule = pipelining.schedule
    n_halves, rest = divmod(manifest.n_nano_batches, schedule.n_microbatches)
    if rest or not n_halves:
        raise PlanError(
            f"a step has {manifest.n_nano_batches} nano-batches, schedule {schedule.name} has "
            f"{schedule.n_microbatches} microbatches; each needs equally many"
        )
    return n_halves


def _check_documents(manifest: Manifest, table: Timetable, n_halves: int) -> None:
    if n_halves % 2:
        why = f"microbatches of {n_halves} nano-batches have no pairs of them to be cut between"
        refuse_carried_keys(manifest, why, handed_over=True)
    held = manifest.held
    microbatch = manifest.document_nano_batch[held.document] // n_halves
    for unit_of in table.unit_of:
        unit = unit_of[table.pipeline_rank[held.rank], microbatch]
        elsewhere = unit != unit[manifest.first_segment[held.document]]
        if not elsewhere.any():
            continue
        document = int(held.document[np.flatnonzero(elsewhere)[0]])
        ranks = held.rank[held.document == document]
        raise PlanError(
            f"document {manifest.document_id[document]} lies on ranks {ranks.tolist()}, pipeline "
            f"places {table.pipeline_rank[ranks].tolist()}: give each stage's copy its own id"
        )


Number = TypeVar("Number", np.int64, np.float64)


class _Half(NamedTuple):
    """The plan of one half.

    Attributes:
        sheet: what is known of it.
        pieces: of each phase, as :func:`~control_plane.planner.rounds.plan_in_rounds` returns them.
        stuck_unit, stuck_segment: as well.
    """

    sheet: Sheet
    pieces: tuple[Int64Array, Int64Array]
    stuck_unit: int
    stuck_segment: int


def _plan_half(
    step: Step, table: Timetable, fleet: Fleet, bounds: Bounds, moved_to: Int64Array
) -> _Half:
    sheet = empty_sheet(table, len(fleet.rank), moved_to)
    forward, backward, *stuck = plan_in_rounds(
        step, table, fleet, bounds, make_desk(len(step.document), len(step.carried.rank)), sheet
    )
    return _Half(sheet, (forward, backward), *stuck)


def _check_halves(
    halves: Sequence[_Half],
    manifest: Manifest,
    servers: Sequence[PlanningServer],
    fleet: Fleet,
    table: Timetable,
    bounds: Bounds,
) -> None:
    """Checks that all has a place, and that each server can hold what it serves in each slot."""
    stuck = [half for half in halves if half.stuck_unit >= 0]
    if stuck:
        first = min(stuck, key=lambda half: half.stuck_unit)
        outcome = outcome_of(first.sheet.outcomes[first.stuck_unit].tolist())
        # What is short looks for a segment of the manifest.
        segment = first.stuck_segment - max(outcome.stuck_segment, 0)
        rules = bounds.rules[int(table.phase[first.stuck_unit])]
        raise PlanError(explain.what_is_short(manifest, servers, outcome, segment, rules))
    if not fleet.is_limited:
        return
    rows = np.stack([half.sheet.rows for half in halves])
    over = rows - fleet.capacity_rows
    if (over <= 0).all():
        return
    half, slot, at = map(int, np.unravel_index(int(over.argmax()), over.shape))
    raise PlanError(
        f"server {servers[at].server.server_id} would hold {rows[half, slot, at]} q plus "
        f"k/v rows in slot {slot} of the schedule, its capacity_rows is "
        f"{servers[at].capacity_rows}: {over[half, slot, at]} rows short"
    )


def _tasks(
    halves: Sequence[_Half], manifest: Manifest, fleet: Fleet, moved_to: Int64Array, phase: int
) -> TaskTable:
    """All tasks of a phase."""
    divided = is_divided(manifest)
    end, whole = manifest.segment_length, np.ones(manifest.n_segments, dtype=np.bool_)
    if divided:
        end = frozen(manifest.segment_offset + manifest.segment_length)
        whole = manifest.segment_length == manifest.document_length[manifest.segment_document]
    segments = Segments(
        manifest.segment_document,
        manifest.segment_offset,
        end,
        manifest.segment_rank,
        whole,
        divided,
        manifest.first_segment,
    )
    pieces = np.concatenate([half.pieces[phase] for half in halves])
    n_tasks = sum(int(half.sheet.counts[phase, TASKS]) for half in halves)
    columns = [np.empty(n_tasks, dtype=np.int64) for _ in range(4)]
    write_tasks_of_pieces(Cuts(pieces, moved_to[phase], n_tasks), segments, fleet, *columns)
    return TaskTable(*map(frozen, columns))


def _by_nano_batch(of_halves: Sequence[NDArray[Number]]) -> NDArray[Number]:
    """``[n_nano_batches, ...]`` from ``[n_microbatches, ...]`` of each half."""
    stacked = np.stack(of_halves, axis=1)
    return stacked.reshape(-1, *stacked.shape[2:])
