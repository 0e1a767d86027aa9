"""The default planner: works from capacity, counts true bytes, cuts where it is cheapest.

Every server gets a cap, (1 + tolerance) x the level at which all would finish together. What is
above it is exported down to it, into room below it (see ``control_plane/planner``: ``placement``
for work without a server at home, ``exports`` for the rest, ``chunk`` for where to cut, ``phase``
for the order of the steps). Forward and backward are planned apart, on each server's own cost
profile and speed, and so is every nano-batch. ``docs/planner.md`` explains the algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from control_plane.planner import explain
from control_plane.planner.board import Limits
from control_plane.planner.chunk import CutRules, cut_rules
from control_plane.planner.costs import PHASE_INDEX
from control_plane.planner.fleet import REMEMBERED, Fleet, build_fleet
from control_plane.planner.forecast import forecast_fleet, row_bytes
from control_plane.planner.links import Links
from control_plane.planner.phase import Outcome, plan_phase
from control_plane.planner.planning import PlanningOptions, PlanningServer
from control_plane.planner.survey import NanoBatch, nano_batches, survey
from control_plane.planner.tasks import Cuts, write_tasks
from core_attention.arrays import Int64Array, frozen
from core_attention.ca_task import MaskKind, Phase, TaskTable
from core_attention.errors import PlanError
from core_attention.manifest import Manifest
from core_attention.plan import Plan
from core_attention.shape import AttentionShape

MOST_VARIANTS = 64
VARIANT_SERVERS = 384
"""Small fleets are planned ``VARIANT_SERVERS / n_servers`` times, each time with other near-ties,
and the cheapest plan wins: it costs little time there, and one chunk more or less weighs most."""


def plan(
    manifest: Manifest,
    servers: Sequence[PlanningServer],
    shape: AttentionShape,
    options: PlanningOptions,
    *,
    epoch: int = 0,
) -> Plan:
    """Plans one step; see :class:`~control_plane.planner.planning.Planner`.

    Raises:
        PlanError: no server can take some of the work, or memory or bytes are short; the message
            says which, and by how much.
    """
    fleet = build_fleet(servers, manifest.n_ranks)
    links = _links(servers, fleet, options)
    found = survey(manifest, fleet)
    batches = nano_batches(manifest, found)
    tables, forecasts, reasons = {}, {}, []
    for phase in Phase:
        tasks, outcomes = _plan_tasks(
            manifest,
            servers,
            fleet,
            links,
            batches,
            shape,
            options,
            phase,
        )
        forecast = forecast_fleet(manifest, tasks, fleet, found, shape, phase)
        explain.check_capacity(servers, fleet, forecast, options, manifest, tasks, shape, phase)
        tables[phase], forecasts[phase] = tasks, forecast
        reasons.append(explain.reason(servers, fleet, forecast, outcomes, options, phase))
    return Plan(
        manifest=manifest,
        epoch=epoch,
        servers=tuple([server.server for server in servers]),
        forward=tables[Phase.FORWARD],
        backward=tables[Phase.BACKWARD],
        mask=MaskKind.CAUSAL,
        planner="balanced",
        reason="; ".join(reasons),
        forward_forecast=forecasts[Phase.FORWARD],
        backward_forecast=forecasts[Phase.BACKWARD],
        tasks_are_valid=True,  # or there were no forecasts
    )


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
    rules = _rules(shape, phase, options)
    limits = _limits(fleet, shape, phase, options)
    n_variants = min(max(VARIANT_SERVERS // len(servers), 1), MOST_VARIANTS)
    all_cuts, outcomes = [], []
    for batch in batches:
        cuts, outcome = plan_phase(
            batch.segments,
            batch.home[PHASE_INDEX[phase]],
            fleet,
            rules,
            limits,
            links,
            float(options.tolerance),
            n_variants,
        )
        if outcome.stuck_segment >= 0 or outcome.stuck_server >= 0:
            short = explain.what_is_short(manifest, servers, outcome, batch.low, options, rules)
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


def _rules(shape: AttentionShape, phase: Phase, options: PlanningOptions) -> CutRules:
    per_row = row_bytes(shape, phase)
    forward = phase is Phase.FORWARD
    return cut_rules(
        PHASE_INDEX[phase],
        per_row.q_request + per_row.q_reply,
        per_row.kv_request + per_row.kv_reply,
        options.min_forward_tokens if forward else options.min_backward_tokens,
        options.finest_cut_tokens,
    )


def _limits(fleet: Fleet, shape: AttentionShape, phase: Phase, options: PlanningOptions) -> Limits:
    per_row = row_bytes(shape, phase)
    n_processes = len(fleet.server_of_rank) + len(fleet.rank)
    most = options.max_process_bytes
    process_bytes = np.full(n_processes, np.inf if most is None else float(most))
    return Limits(
        active=most is not None or fleet.is_limited,
        rows=fleet.capacity_rows,
        sent_bytes=process_bytes,
        received_bytes=process_bytes,
        q_request=float(per_row.q_request),
        kv_request=float(per_row.kv_request),
        q_reply=float(per_row.q_reply),
        kv_reply=float(per_row.kv_reply),
    )


def _links(servers: Sequence[PlanningServer], fleet: Fleet, options: PlanningOptions) -> Links:
    """Who shares a host, and what a byte costs: 1 between hosts."""
    n_ranks = len(fleet.server_of_rank)
    if options.rank_hosts is not None and len(options.rank_hosts) != n_ranks:
        raise PlanError(
            f"rank_hosts names {len(options.rank_hosts)} hosts; the step has {n_ranks} ranks"
        )
    hosts = tuple([server.host for server in servers])
    server_host, known_rank_host = _host_columns(hosts, options.rank_hosts, n_ranks)
    rank_host = known_rank_host.copy()
    in_place = fleet.rank >= 0
    rank_host[fleet.rank[in_place]] = server_host[in_place]
    near = options.network_bytes_per_second / options.host_bytes_per_second
    return Links(rank_host, server_host, near, 1.0)


@lru_cache(maxsize=REMEMBERED)
def _host_columns(
    hosts: tuple[str, ...], rank_hosts: tuple[str, ...] | None, n_ranks: int
) -> tuple[Int64Array, Int64Array]:
    """``[n_servers]`` index of each server's host, and ``[n_ranks]`` of each rank's as far as
    ``rank_hosts`` say, -1 for others; mostly the same in every step of a job."""
    index: dict[str, int] = {}
    server_host = np.array([index.setdefault(host, len(index)) for host in hosts], dtype=np.int64)
    rank_host = np.full(n_ranks, -1, dtype=np.int64)
    if rank_hosts is not None:
        rank_host[:] = [index.get(host, -1) for host in rank_hosts]
    return frozen(server_host), frozen(rank_host)
