"""Idle-aware plans of pipelines: slot after slot, each on top of what runs beside it.

In a slot of a schedule some ranks run forwards, others backwards, and some idle. Documents that run
in the same slots are planned together, as one nano-batch; the base load of a server is what its
rank computes beside attention in these slots, and the attention that was planned for them before.
So who idles takes more. The plan of a step is the tasks of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from control_plane.planner import explain
from control_plane.planner.board import Segments
from control_plane.planner.bounds import limits_of, links_of, n_variants, rules_of
from control_plane.planner.compiled import BoolArray
from control_plane.planner.costs import PHASE_INDEX
from control_plane.planner.fleet import REMEMBERED, Fleet, build_fleet
from control_plane.planner.forecast import (
    KV_ROWS,
    Q_ROWS,
    Places,
    TaskSums,
    no_carried,
    sum_tasks,
    to_forecast,
)
from control_plane.planner.phase import Outcome, plan_phase
from control_plane.planner.planning import (
    NO_BASE,
    PlanningOptions,
    PlanningServer,
    refuse_cut_documents,
)
from control_plane.planner.survey import Columns, HomeWork, Survey, look
from control_plane.planner.tasks import write_tasks
from core_attention.arrays import Float64Array, Int64Array, frozen, runs_to_rows
from core_attention.ca_task import MaskKind, Phase, TaskTable
from core_attention.errors import PlanError
from core_attention.manifest import Manifest
from core_attention.pipelining import Pipelining
from core_attention.plan import Plan, PlanVerdict, SlotForecast
from core_attention.shape import AttentionShape


class Span(NamedTuple):
    """One action in the table of slots.

    Attributes:
        begin, end: the slots it takes, half-open.
        layers: calls of core attention in it.
    """

    begin: int
    end: int
    layers: int


@dataclass(frozen=True)
class Unit:
    """What is planned together: it runs in the same slots.

    Attributes:
        phase: of core attention.
        half: of each microbatch, where these have several nano-batches.
        spans: one for each stage that a rank has.
    """

    phase: Phase
    half: int
    spans: tuple[Span, ...]

    @property
    def layers(self) -> int:
        """Of all stages of a rank."""
        return sum(span.layers for span in self.spans)


@dataclass(frozen=True, eq=False)
class Timetable:
    """A pipelining as columns, for steps with so many nano-batches.

    Attributes:
        units: in the order in which they are planned.
        unit_of: for each phase, ``[n_pipeline_ranks, n_nano_batches]`` index into ``units``.
        n_halves: nano-batches of a microbatch.
        microbatch: ``[n_slots, n_pipeline_ranks]`` what runs, 0 where a rank idles.
        token_seconds: ``[n_slots, n_pipeline_ranks]`` seconds of one token beside attention, 0
            where a rank idles.
        pipeline_rank: ``[n_ranks]``.
        max_layers: of the rank that has most.
    """

    units: tuple[Unit, ...]
    unit_of: dict[Phase, Int64Array]
    n_halves: int
    microbatch: Int64Array
    token_seconds: Float64Array
    pipeline_rank: Int64Array
    max_layers: int


@lru_cache(maxsize=REMEMBERED)
def timetable(pipelining: Pipelining, n_nano_batches: int) -> Timetable:
    """The columns of ``pipelining``.

    Raises:
        PlanError: its microbatches do not divide the nano-batches.
    """
    schedule, n_slots = pipelining.schedule, pipelining.kind_slots
    n_halves, rest = divmod(n_nano_batches, schedule.n_microbatches)
    if rest or not n_halves:
        raise PlanError(
            f"a step has {n_nano_batches} nano-batches, schedule {schedule.name} has "
            f"{schedule.n_microbatches} microbatches; each needs equally many"
        )
    slots = pipelining.slots
    microbatch = np.zeros((len(slots), schedule.n_ranks), dtype=np.int64)
    token_seconds = np.zeros((len(slots), schedule.n_ranks))
    spans: dict[tuple[Phase, int, int], dict[int, Span]] = {}
    for at, slot in enumerate(slots):
        for rank, action in enumerate(slot):
            if action is None:
                continue
            microbatch[at, rank] = action.microbatch
            seconds = pipelining.seconds(action.stage, action.kind)
            token_seconds[at, rank] = seconds / n_slots[action.kind]
            phase = action.kind.attention_phase
            if phase is not None:
                of_stage = spans.setdefault((phase, rank, action.microbatch), {})
                begin = of_stage[action.stage].begin if action.stage in of_stage else at
                of_stage[action.stage] = Span(begin, at + 1, pipelining.layers[action.stage])
    found = {
        key: tuple(sorted(of_stage.values(), key=lambda span: span.begin))
        for key, of_stage in spans.items()
    }
    distinct = {(phase, its) for (phase, _, _), its in found.items()}
    # Backwards first: their pieces are the larger ones, and forwards fill up what they leave.
    in_order = sorted(distinct, key=lambda unit: (unit[1], unit[0] is Phase.FORWARD))
    units = tuple(Unit(phase, half, its) for phase, its in in_order for half in range(n_halves))
    index = {unit: at for at, unit in enumerate(units)}
    unit_of = {phase: np.zeros((schedule.n_ranks, n_nano_batches), np.int64) for phase in Phase}
    for (phase, rank, i), its in found.items():
        for half in range(n_halves):
            unit_of[phase][rank, i * n_halves + half] = index[Unit(phase, half, its)]
    return Timetable(
        units,
        {phase: frozen(column) for phase, column in unit_of.items()},
        n_halves,
        frozen(microbatch),
        frozen(token_seconds),
        frozen(np.array(pipelining.pipeline_ranks, dtype=np.int64)),
        pipelining.max_layers,
    )


def plan_slots(
    manifest: Manifest,
    servers: Sequence[PlanningServer],
    shape: AttentionShape,
    options: PlanningOptions,
    *,
    epoch: int = 0,
) -> Plan:
    """Plans one step of pipelines; see :class:`~control_plane.planner.planning.Planner`.

    Raises:
        PlanError: as ``balanced.plan``; or the manifest does not fit ``options.pipelining``.
    """
    pipelining = options.pipelining
    assert pipelining is not None
    _check_options(manifest, servers, options, pipelining)
    table = timetable(pipelining, manifest.n_nano_batches)
    fleet = build_fleet(servers, manifest.n_ranks)
    links = links_of(servers, fleet, options)
    columns = {phase: _sort(manifest, table, fleet, phase) for phase in Phase}
    rules_in = {phase: rules_of(shape, phase, options) for phase in Phase}
    unlimited = {phase: limits_of(fleet, shape, phase, options) for phase in Phase}
    sheet = _Sheet(manifest, fleet, table)
    for at, unit in enumerate(table.units):
        its = columns[unit.phase]
        if its.bounds[at] == its.bounds[at + 1]:
            continue
        rules, limits = rules_in[unit.phase], unlimited[unit.phase]
        work, based = _work(its, at, unit), sheet.fleet_beside(unit)
        if fleet.is_limited:
            limits = limits_of(based, shape, unit.phase, options)
        cuts, outcome = plan_phase(
            work.segments,
            work.home,
            based,
            rules,
            limits,
            links,
            float(options.tolerance),
            n_variants(len(servers)),
            sheet.work_ratio[unit.phase],
        )
        if outcome.stuck_segment >= 0 or outcome.stuck_server >= 0:
            stuck = max(outcome.stuck_segment, 0)
            first = int(its.segment[its.bounds[at] + stuck]) - stuck
            short = explain.what_is_short(manifest, servers, outcome, first, options, rules)
            raise PlanError(short)
        columns_of_tasks = [np.empty(cuts.n_tasks, dtype=np.int64) for _ in range(4)]
        write_tasks(cuts, work.segments, based, *columns_of_tasks)
        sheet.enter(unit, work, TaskTable(*map(frozen, columns_of_tasks)), outcome)
    sheet.check_rows(servers)
    slots = sheet.slot_forecast()
    tables = {phase: sheet.tasks(phase) for phase in Phase}
    forecasts = {
        phase: to_forecast(
            _home_seconds(manifest, table, columns[phase], phase), sheet.sums[phase], shape, phase
        )
        for phase in Phase
    }
    return Plan(
        manifest=manifest,
        epoch=epoch,
        servers=tuple([server.server for server in servers]),
        forward=tables[Phase.FORWARD],
        backward=tables[Phase.BACKWARD],
        mask=MaskKind.CAUSAL,
        planner="balanced",
        reason=explain.reason_of_slots(servers, pipelining, slots, sheet.outcomes, options),
        verdict=PlanVerdict.of_imbalance(slots.step_imbalance, options.tolerance),
        forward_forecast=forecasts[Phase.FORWARD],
        backward_forecast=forecasts[Phase.BACKWARD],
        slots=slots,
        tasks_are_valid=True,  # each unit's are, and every document is in one
    )


def _check_options(
    manifest: Manifest,
    servers: Sequence[PlanningServer],
    options: PlanningOptions,
    pipelining: Pipelining,
) -> None:
    if len(pipelining.pipeline_ranks) != manifest.n_ranks:
        raise PlanError(
            f"pipeline_ranks names {len(pipelining.pipeline_ranks)} ranks; the step has "
            f"{manifest.n_ranks}"
        )
    if options.max_process_bytes is not None:
        raise PlanError(
            f"max_process_bytes is {options.max_process_bytes}; plans of pipelines know no such "
            "limit: leave it out"
        )
    refuse_cut_documents(manifest, "the nano-batches of pipelines run apart")
    based = [server for server in servers if server.base_seconds != NO_BASE]
    if based:
        raise PlanError(
            f"server {based[0].server.server_id}: base_seconds are {based[0].base_seconds}; of "
            "pipelines the schedule says them: leave them out"
        )


class _Sorted(NamedTuple):
    """The segments of a step, unit by unit in one phase.

    Attributes:
        bounds: ``[n_units + 1]`` first segment of each unit, here.
        segment: ``[n_segments]`` its index in the manifest, in ascending order in each unit.
        document: ``[n_segments]`` number of its document, counted here from 0.
        first: ``[n_documents + 1]`` first segment of each document, here.
        begin, end, rank, nano_batch: ``[n_segments]`` of the segments.
        whole: ``[n_segments]`` whether it is all of its document.
        divided: whether any is not.
        of_document: ``[n_segments]`` its document in the manifest.
        seconds: ``[2, n_segments]`` of each at home, forward and backward.
        rank_seconds, longest, mean_end: of ``Survey``, of units instead of nano-batches.
    """

    bounds: Int64Array
    segment: Int64Array
    document: Int64Array
    first: Int64Array
    begin: Int64Array
    end: Int64Array
    rank: Int64Array
    nano_batch: Int64Array
    whole: BoolArray
    divided: bool
    of_document: Int64Array
    seconds: Float64Array
    rank_seconds: Float64Array
    longest: Int64Array
    mean_end: Float64Array


def _sort(manifest: Manifest, table: Timetable, fleet: Fleet, phase: Phase) -> _Sorted:
    """The segments by unit, and what they take at home.

    Raises:
        PlanError: a document lies on ranks that do not run it in the same slots.
    """
    of_document = manifest.segment_document
    nano_batch = manifest.document_nano_batch[of_document]
    unit = table.unit_of[phase][table.pipeline_rank[manifest.segment_rank], nano_batch]
    elsewhere = unit != unit[manifest.first_segment[of_document]]
    if elsewhere.any():
        document = int(of_document[np.flatnonzero(elsewhere)[0]])
        ranks = manifest.segment_rank[of_document == document]
        raise PlanError(
            f"document {manifest.document_id[document]} lies on ranks {ranks.tolist()}, which have "
            f"the places {table.pipeline_rank[ranks].tolist()} in their pipelines: a document may "
            "span ranks that run the same stages only; give each stage's copy an id of its own"
        )
    # Stable sorts of narrow integers count them, which takes a fraction of the time.
    narrow = unit.astype(np.uint16) if len(table.units) < 2**16 else unit
    order = np.argsort(narrow, kind="stable")
    bounds = np.append(0, np.cumsum(np.bincount(unit, minlength=len(table.units))))
    of_document = of_document[order]
    new = np.diff(of_document, prepend=-1) != 0
    begin, length = manifest.segment_offset[order], manifest.segment_length[order]
    end, rank = frozen(begin + length), frozen(manifest.segment_rank[order])
    whole = length == manifest.document_length[of_document]
    divided, seconds = not bool(whole.all()), np.empty((2, len(order)))
    rank_seconds, longest, mean_end = _look_at_units(
        Columns(frozen(begin), end, rank, divided, *seconds), unit[order], len(table.units), fleet
    )
    return _Sorted(
        bounds,
        order,
        np.cumsum(new) - 1,
        np.append(np.flatnonzero(new), len(order)),
        frozen(begin),
        end,
        rank,
        nano_batch[order],
        whole,
        divided,
        of_document,
        seconds,
        rank_seconds,
        longest,
        mean_end,
    )


def _look_at_units(
    segments: Columns, unit: Int64Array, n_units: int, fleet: Fleet
) -> tuple[Float64Array, Int64Array, Float64Array]:
    """Fills in the seconds of ``segments``, which are of ``unit``; returns ``rank_seconds``,
    ``longest`` and ``mean_end`` of ``_Sorted``."""
    n_ranks = len(fleet.server_of_rank)
    # One look at all of them: in each unit a rank counts as another one.
    apart = fleet._replace(server_of_rank=frozen(np.tile(fleet.server_of_rank, n_units)))
    rank = frozen(unit * n_ranks + segments.rank)
    sums = np.zeros((2, n_units * n_ranks))
    longest = np.zeros(n_units * n_ranks, dtype=np.int64)
    look(segments._replace(rank=rank), apart, sums, longest)
    begin, end = segments.begin.astype(np.float64), segments.end.astype(np.float64)
    held = 0.5 * (end * end - begin * begin)
    pairs = np.bincount(unit, held, n_units)
    moment = np.bincount(unit, held * end, n_units)
    rank_seconds = sums.reshape(2, n_units, n_ranks).transpose(1, 0, 2).copy()
    mean_end = moment / np.where(pairs > 0.0, pairs, 1.0)
    return rank_seconds, longest.reshape(n_units, n_ranks), mean_end


def _home_seconds(manifest: Manifest, table: Timetable, its: _Sorted, phase: Phase) -> Float64Array:
    """``[n_nano_batches, n_ranks]`` seconds at home, in the mean of the job's layers."""
    n_nano, n_ranks = manifest.n_nano_batches, manifest.n_ranks
    share = np.array([unit.layers / table.max_layers for unit in table.units])
    seconds = its.seconds[PHASE_INDEX[phase]] * np.repeat(share, np.diff(its.bounds))
    at = its.nano_batch * n_ranks + its.rank
    sums = np.bincount(at, seconds, n_nano * n_ranks)
    return sums.astype(np.float64, copy=False).reshape(n_nano, n_ranks)


class _Work(NamedTuple):
    """What is planned at once, documents counted from 0.

    Attributes:
        segments: of one unit.
        home: what they take.
        survey: of them.
        nano_batches: ``[n]`` those that it has segments of.
        documents: ``[n_documents]`` index in the manifest.
    """

    segments: Segments
    home: HomeWork
    survey: Survey
    nano_batches: Int64Array
    documents: Int64Array


def _work(its: _Sorted, at: int, unit: Unit) -> _Work:
    low, high = int(its.bounds[at]), int(its.bounds[at + 1])
    begin, end, rank, nano_batch = (
        column[low:high] for column in (its.begin, its.end, its.rank, its.nano_batch)
    )
    whole = its.whole[low:high]
    first_document, last_document = int(its.document[low]), int(its.document[high - 1])
    first = frozen(its.first[first_document : last_document + 2] - low)
    document = frozen(its.document[low:high] - first_document)
    starts = np.flatnonzero(np.diff(nano_batch, prepend=-1))
    nano_batches, bounds = nano_batch[starts], np.append(starts, high - low)
    seconds = its.seconds[:, low:high].copy()
    sums, longest = its.rank_seconds[at], its.longest[at]
    phase = PHASE_INDEX[unit.phase]
    segments = Segments(document, begin, end, rank, whole, its.divided, first)
    home = HomeWork(seconds[phase], sums[phase], longest, float(its.mean_end[at]))
    survey = Survey(
        bounds,
        seconds,
        end,
        whole,
        its.divided,
        its.rank_seconds[at : at + 1],
        its.longest[at : at + 1],
        its.mean_end[at : at + 1],
    )
    return _Work(segments, home, survey, nano_batches, its.of_document[low:high][first[:-1]])


_TaskColumns = tuple[Int64Array, Int64Array, Int64Array, Int64Array]
"""``TaskTable.document``, ``q_begin``, ``q_end`` and ``server``."""


class _Sheet:
    """What is known of the slots while units are planned, and in the end the plan. Arrays of slots
    are ``[n_halves, n_slots, n_ranks or n_servers]``.

    Attributes:
        outcomes: of the units so far.
        sums: for each phase, what the tasks so far cost each server, in the mean of the job's
            layers.
        work_ratio: for each phase, the newest outcome's; 0 before.
    """

    def __init__(self, manifest: Manifest, fleet: Fleet, table: Timetable) -> None:
        self._fleet, self._table = fleet, table
        n_nano, n_ranks, n_servers = manifest.n_nano_batches, manifest.n_ranks, len(fleet.rank)
        nano_batch = manifest.document_nano_batch[manifest.segment_document]
        tokens = np.bincount(
            nano_batch * n_ranks + manifest.segment_rank,
            weights=manifest.segment_length,
            minlength=n_nano * n_ranks,
        ).reshape(n_nano, n_ranks)
        of_rank = table.pipeline_rank
        linear = np.stack(
            [
                tokens[table.microbatch[:, of_rank] * table.n_halves + half, np.arange(n_ranks)]
                * table.token_seconds[:, of_rank]
                for half in range(table.n_halves)
            ]
        )
        self._linear = np.where(fleet.rank >= 0, linear[:, :, fleet.rank], 0.0)
        self._busy = self._linear.copy()
        self._busy_at_home = linear
        self._rows = np.zeros(self._busy.shape, dtype=np.int64)
        self._tasks: dict[Phase, list[_TaskColumns]] = {phase: [] for phase in Phase}
        self._no_carried = no_carried()
        self.outcomes: list[Outcome] = []
        self.work_ratio = dict.fromkeys(Phase, 0.0)
        self.sums = {phase: TaskSums.none(n_nano, n_servers) for phase in Phase}

    def fleet_beside(self, unit: Unit) -> Fleet:
        """The servers with what they compute in one layer of ``unit`` besides it."""
        taken = [slot for span in unit.spans for slot in range(span.begin, span.end)]
        base = np.zeros_like(self._fleet.base)
        base[PHASE_INDEX[unit.phase]] = self._busy[unit.half, taken].sum(axis=0) / unit.layers
        rows = self._fleet.capacity_rows
        if self._fleet.is_limited:
            rows = np.maximum(rows - self._rows[unit.half, taken].max(axis=0), 0)
        return self._fleet._replace(base=base, is_based=True, capacity_rows=rows)

    def enter(self, unit: Unit, work: _Work, tasks: TaskTable, outcome: Outcome) -> None:
        """Adds the plan of ``unit``, with documents counted as in ``work``."""
        phase, segments = unit.phase, work.segments
        places = Places(
            segments.first_of_document,
            segments.document,
            segments.begin,
            frozen(segments.end - segments.begin),
            segments.rank,
            self._no_carried,
        )
        sums = sum_tasks(tasks, places, work.survey, self._fleet, PHASE_INDEX[phase])
        if sums is None:
            raise AssertionError(f"the tasks of {unit} are not valid: {tasks}")
        share = unit.layers / self._table.max_layers
        in_mean = sums if share == 1.0 else sums.in_share_of_layers(share)
        self.sums[phase].add(work.nano_batches, in_mean)
        seconds = sums.seconds.sum(axis=0)
        if self._fleet.is_limited:
            rows = sums.rows[:, (Q_ROWS, KV_ROWS)].sum(axis=(0, 1))
            for begin, end, _ in unit.spans:
                self._rows[unit.half, begin:end] += rows
        for begin, end, layers in unit.spans:
            self._busy[unit.half, begin:end] += seconds * (layers / (end - begin))
            at_home = work.home.rank_seconds * (layers / (end - begin))
            self._busy_at_home[unit.half, begin:end] += at_home
        documents = work.documents[tasks.document]
        self._tasks[phase].append((documents, tasks.q_begin, tasks.q_end, tasks.server))
        self.outcomes.append(outcome)
        self.work_ratio[phase] = outcome.work_ratio

    def check_rows(self, servers: Sequence[PlanningServer]) -> None:
        """Checks that each server can hold what it serves in each slot.

        Raises:
            PlanError: it cannot.
        """
        over = self._rows - self._fleet.capacity_rows
        if not self._fleet.is_limited or (over <= 0).all():
            return
        half, slot, at = map(int, np.unravel_index(int(over.argmax()), over.shape))
        raise PlanError(
            f"server {servers[at].server.server_id} would hold {self._rows[half, slot, at]} q plus "
            f"k/v rows in slot {slot} of the schedule, its capacity_rows is "
            f"{servers[at].capacity_rows}: {over[half, slot, at]} rows short"
        )

    def tasks(self, phase: Phase) -> TaskTable:
        """All tasks of ``phase``."""
        columns = [np.concatenate(column) for column in zip(*self._tasks[phase], strict=True)]
        # Those of a document follow one another already, so documents are put in order, not tasks.
        document = columns[0]
        begin = np.flatnonzero(np.diff(document, prepend=-1))
        run = np.empty(len(begin), dtype=np.int64)
        run[document[begin]] = np.arange(len(begin))
        length = np.diff(begin, append=len(document))
        order = runs_to_rows(begin[run], length[run])
        return TaskTable(*(frozen(column[order]) for column in columns))

    def slot_forecast(self) -> SlotForecast:
        """What each server does in each slot."""
        return SlotForecast(
            home_seconds=self._busy_at_home, base_seconds=self._linear, seconds=self._busy
        )
