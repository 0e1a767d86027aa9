"""The default planner: works from capacity, counts true bytes, cuts where it is cheapest.

Every server gets a cap, (1 + tolerance) x the target load at which all would finish together. What
is above it is exported down to it, into room below it (see ``control_plane/planner``: ``placement``
for work without a server at home, ``exports`` for the rest, ``chunk`` for where to cut, ``phase``
for the order of the steps). Forward and backward are planned apart, on each server's own cost
profile and speed, side by side where a step is large; and so is every nano-batch.
``docs/planner.md`` explains the algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from control_plane.planner import explain, full
from control_plane.planner.bounds import links_of, n_variants, rules_of
from control_plane.planner.costs import PHASE_INDEX
from control_plane.planner.fleet import Fleet, build_fleet
from control_plane.planner.forecast import forecast_fleet
from control_plane.planner.links import Links
from control_plane.planner.phase import Outcome, plan_phase
from control_plane.planner.planning import PlanningOptions, PlanningServer
from control_plane.planner.side_by_side import threads
from control_plane.planner.slots import plan_slots
from control_plane.planner.survey import NanoBatch, nano_batches, survey
from control_plane.planner.tasks import Cuts, write_tasks
from core_attention.arrays import frozen
from core_attention.ca_task import MaskKind, Phase, TaskTable
from core_attention.errors import PlanError
from core_attention.manifest import Manifest
from core_attention.plan import PhaseForecast, Plan, PlanVerdict
from core_attention.shape import AttentionShape

WORTH_A_THREAD = 4096
"""Segments of a step from which on both phases are planned at the same time: fewer take about as
long as a thread takes to start."""


def plan(
    manifest: Manifest,
    servers: Sequence[PlanningServer],
    shape: AttentionShape,
    options: PlanningOptions,
    *,
    epoch: int = 0,
) -> Plan:
    """Plans one step, of pipelines slot after slot; see
    :class:`~control_plane.planner.planning.Planner`.
    """
    if shape.mask is MaskKind.FULL:
        return full.plan(manifest, servers, shape, options, epoch=epoch)
    if options.pipelining is not None:
        return plan_slots(manifest, servers, shape, options, epoch=epoch)
    fleet = build_fleet(servers, manifest.n_ranks)
    links = links_of(servers, fleet, options)
    found = survey(manifest, fleet)
    batches = nano_batches(manifest, found)

    def plan_of(phase: Phase) -> _PhasePlan:
        tasks, outcomes = _plan_tasks(
            manifest, servers, fleet, links, batches, shape, options, phase
        )
        forecast = forecast_fleet(manifest, tasks, fleet, found, shape, phase)
        if manifest.shares_keys:
            counted = full.rows_and_bytes(manifest, tasks, servers, shape, phase)
            forecast = PhaseForecast(forecast.home_seconds, forecast.seconds, **counted)
        explain.check_capacity(servers, fleet, forecast)
        longest = [int(batch.home[0].longest.max()) for batch in batches]
        rules = rules_of(shape, phase, options)
        verdict = explain.verdict(servers, fleet, outcomes, longest, options, rules, phase)
        reason = explain.reason(servers, fleet, forecast, outcomes, options, phase, verdict)
        return _PhasePlan(tasks, forecast, verdict, reason)

    with threads(2 if manifest.n_segments >= WORTH_A_THREAD else 1) as run:
        forward, backward = run(plan_of, Phase)
    return Plan(
        manifest=manifest,
        epoch=epoch,
        servers=tuple([server.server for server in servers]),
        forward=forward.tasks,
        backward=backward.tasks,
        mask=MaskKind.CAUSAL,
        planner="balanced",
        reason=f"{forward.reason}; {backward.reason}",
        verdict=explain.worst_verdict([forward.verdict, backward.verdict]),
        forward_forecast=forward.forecast,
        backward_forecast=backward.forecast,
        tasks_are_valid=True,  # or there were no forecasts
    )


class _PhasePlan(NamedTuple):
    """The share of a plan in one phase."""

    tasks: TaskTable
    forecast: PhaseForecast
    verdict: PlanVerdict
    reason: str


def _plan_tasks(
    manifest: Manifest,
    servers: Sequence[PlanningServer],
    fleet: Fleet,
    links: Links,
    batches: Sequence[NanoBatch],
    shape: AttentionShape,
    options: PlanningOptions,
    phase: Phase,
) -> tuple[TaskTable, list[Outcome]]:
    """The tasks of ``phase``, and what happened in each nano-batch."""
    rules = rules_of(shape, phase, options)
    all_cuts, outcomes = [], []
    for batch in batches:
        cuts, outcome = plan_phase(
            batch.segments,
            batch.home[PHASE_INDEX[phase]],
            fleet,
            rules,
            links,
            float(options.tolerance),
            n_variants(len(servers)),
            0.0,
        )
        if outcome.stuck_segment >= 0 or outcome.stuck_server >= 0:
            short = explain.what_is_short(manifest, servers, outcome, batch.low, rules)
            raise PlanError(short)
        all_cuts.append(cuts)
        outcomes.append(outcome)
    return _table(batches, all_cuts, fleet), outcomes


def _table(batches: Sequence[NanoBatch], all_cuts: Sequence[Cuts], fleet: Fleet) -> TaskTable:
    """The tasks of all nano-batches."""
    size = sum(cuts.n_tasks for cuts in all_cuts)
    columns = [np.empty(size, dtype=np.int64) for _ in range(4)]
    low = 0
    for batch, cuts in zip(batches, all_cuts, strict=True):
        high = low + cuts.n_tasks
        write_tasks(cuts, batch.segments, fleet, *(column[low:high] for column in columns))
        low = high
    return TaskTable(*(frozen(column) for column in columns))
