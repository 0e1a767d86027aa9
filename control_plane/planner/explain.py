"""The reasons of a plan, or of having none: in words and numbers, for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from control_plane.planner.chunk import SHORTEST_TOKENS, CutRules
from control_plane.planner.costs import PHASE_INDEX
from control_plane.planner.fleet import Fleet
from control_plane.planner.phase import Outcome
from control_plane.planner.planning import PlanningOptions, PlanningServer
from core_attention.ca_task import Phase
from core_attention.errors import PlanError
from core_attention.manifest import Manifest
from core_attention.pipelining import Pipelining
from core_attention.plan import PROMISE, PhaseForecast, PlanVerdict, SlotForecast, imbalance


def over_target_load(outcome: Outcome, tolerance: float) -> float:
    """The share of the target load of the tasks as they were cut by which the busiest server is
    above it."""
    target_load = (outcome.busiest - outcome.excess) / (1.0 + tolerance)
    return outcome.busiest / target_load - 1.0 if target_load > 0 else 0.0


def verdict(
    servers: Sequence[PlanningServer],
    fleet: Fleet,
    outcomes: Sequence[Outcome],
    longest: Sequence[int],
    options: PlanningOptions,
    rules: CutRules,
    phase: Phase,
) -> PlanVerdict:
    """Return whether a phase keeps the tolerance.

    Args:
        outcomes: of its nano-batches.
        longest: where the longest document of each ends.
    """
    worst = PlanVerdict.KEPT
    for outcome, end in zip(outcomes, longest, strict=True):
        over = over_target_load(outcome, options.tolerance)
        if over <= options.tolerance + PROMISE:
            continue
        target_load = outcome.busiest / (1.0 + over)
        if _shortest_seconds(servers, rules, end, phase) > target_load * (
            1.0 + options.tolerance + PROMISE
        ):
            worst = max(worst, PlanVerdict.INDIVISIBLE, key=_BY_WEIGHT.index)
        elif fleet.is_limited:
            worst = max(worst, PlanVerdict.LIMITED, key=_BY_WEIGHT.index)
        else:
            worst = PlanVerdict.MISSED
    return worst


_BY_WEIGHT = tuple(PlanVerdict)


def worst_verdict(verdicts: Sequence[PlanVerdict]) -> PlanVerdict:
    """The one that weighs most."""
    return max(verdicts, key=_BY_WEIGHT.index)


def _shortest_seconds(
    servers: Sequence[PlanningServer], rules: CutRules, end: int, phase: Phase
) -> float:
    """The least seconds of the last queries of a document of ``end`` tokens on the server that does
    them first, however few they are."""
    q = np.arange(1, min(end, SHORTEST_TOKENS) + 1)
    kinds = {(server.profile, server.speed) for server in servers if server.speed > 0}
    seconds = [float(profile.seconds(q, end, phase).min()) / speed for profile, speed in kinds]
    return min(seconds, default=math.inf)


def reason(
    servers: Sequence[PlanningServer],
    fleet: Fleet,
    forecast: PhaseForecast,
    outcomes: Sequence[Outcome],
    options: PlanningOptions,
    phase: Phase,
    judged: PlanVerdict,
) -> str:
    """The bound of a phase, and why the planner stopped. ``judged``: its verdict."""
    base = fleet.base[PHASE_INDEX[phase]]
    total_seconds = forecast.seconds + base
    at = int(total_seconds.argmax())
    busiest = at % len(servers)
    seconds = float(total_seconds.flat[at])
    home_base = np.where(fleet.server_of_rank >= 0, base[fleet.server_of_rank], 0.0)
    text = (
        f"{phase}: imbalance {imbalance(total_seconds):.3f} "
        f"({imbalance(forecast.home_seconds + home_base):.3f} at home), bounded by server "
        f"{servers[busiest].server.server_id} with {seconds * 1e3:.3f} ms a layer"
    )
    if fleet.is_based:
        text += f", {base[busiest] * 1e3:.3f} ms of them its rank's own"
    n_chunks = sum(outcome.n_chunks for outcome in outcomes)
    if n_chunks == 0:
        return f"{text}; nothing moves: {_why_stopped(outcomes, options, judged)}"
    moved = sum(outcome.spent_bytes for outcome in outcomes)
    text += f"; {n_chunks} pieces leave their home with {moved / 1e9:.3f} GB a layer"
    return f"{text}; stopped: {_why_stopped(outcomes, options, judged)}"


def _why_stopped(outcomes: Sequence[Outcome], options: PlanningOptions, judged: PlanVerdict) -> str:
    over = max(over_target_load(outcome, options.tolerance) for outcome in outcomes)
    if over <= options.tolerance + AS_GOOD_AS_KEPT:
        return f"no server is more than {options.tolerance:g} above the target load"
    above = f"the busiest server is {over:.3f} above the target load, the tolerance is"
    if judged is PlanVerdict.KEPT:
        return f"{above} {options.tolerance:g}; plans may be {PROMISE:g} off"
    words = {
        PlanVerdict.INDIVISIBLE: (
            "no plan can keep it: the last queries of the longest document take longer on every "
            "server, however few of them run together"
        ),
        PlanVerdict.LIMITED: "within the memory limits that are set, no better was found",
        PlanVerdict.MISSED: (
            "no better was found, neither with the cheapest pieces nor with pieces that fill all "
            "room"
        ),
    }
    return f"{above} missed, {options.tolerance:g}: {words[judged]}"


AS_GOOD_AS_KEPT = 5e-3
"""Share of the target load that servers may exceed the tolerance by before a reason mentions it."""


def reason_of_slots(
    servers: Sequence[PlanningServer],
    pipelining: Pipelining,
    slots: SlotForecast,
    outcomes: Sequence[Outcome],
    options: PlanningOptions,
) -> str:
    """The same of a step of pipelines, whose slots each have a target load."""
    over = slots.imbalance
    at = int(over.argmax())
    running = " ".join("-" if action is None else str(action) for action in pipelining.slots[at])
    in_slot = slots.seconds[:, at]
    half, busiest = map(int, np.unravel_index(int(in_slot.argmax()), in_slot.shape))
    base, seconds = slots.base_seconds[half, at, busiest], slots.seconds[half, at, busiest]
    text = (
        f"{len(over)} slots of {pipelining}: imbalance {slots.step_imbalance:.3f} "
        f"({slots.home_imbalance:.3f} at home); most, {over[at]:.3f}, in slot {at} ({running}), "
        f"bounded by server {servers[busiest].server.server_id} with {seconds * 1e3:.3f} ms, "
        f"{base * 1e3:.3f} ms of them its rank's own"
    )
    n_chunks = sum(outcome.n_chunks for outcome in outcomes)
    if n_chunks == 0:
        return f"{text}; nothing moves"
    moved = sum(outcome.spent_bytes for outcome in outcomes)
    above = max(over_target_load(outcome, options.tolerance) for outcome in outcomes)
    return (
        f"{text}; {n_chunks} pieces leave their home with {moved / 1e9:.3f} GB a layer; "
        f"the busiest server of any slot is {above:.3f} above the slot's target load when it is "
        f"planned, the tolerance is {options.tolerance:g}"
    )


def what_is_short(
    manifest: Manifest,
    servers: Sequence[PlanningServer],
    outcome: Outcome,
    first_segment: int,
    rules: CutRules,
) -> str:
    """The message of the error that no server can take some work."""
    if outcome.stuck_server >= 0:
        server = servers[outcome.stuck_server]
        rank = server.server.in_place_rank
        needed, capacity = _home_rows(manifest, rank), server.capacity_rows or 0
        short = f"{needed - capacity} rows short"
        if needed <= capacity:
            short = "it holds too many rows of what runs in the same slots of the pipelines"
        return (
            f"server {server.server.server_id}: the tasks of its own rank {rank} need up to "
            f"{needed} q plus k/v rows, its capacity_rows is {server.capacity_rows}: {short}, and "
            f"no other server can take enough of them. Raise capacity_rows, add servers, or pack "
            "fewer tokens"
        )
    segment = first_segment + outcome.stuck_segment
    document = int(manifest.segment_document[segment])
    rank = int(manifest.segment_rank[segment])
    usable = [s for s in servers if s.receives and s.speed > 0]
    what = (
        f"document {manifest.document_id[document]} of {manifest.document_length[document]} "
        f"tokens on rank {rank}, which has no server of its own that runs"
    )
    if not usable:
        return (
            f"{what}: none of the {len(servers)} servers may receive work (receives is false or "
            "speed is 0). Start an attention server, or let one receive"
        )
    capacities = [s.capacity_rows for s in usable if s.capacity_rows is not None]
    if len(capacities) < len(usable):
        return f"{what}: no server can take it. Add servers"
    needed = outcome.stuck_end + min(rules.min_tokens, outcome.stuck_end)
    return (
        f"{what}: its last queries need {needed} q plus k/v rows on one server, and none has as "
        f"many left; capacity_rows is {max(capacities)} at most, {sum(capacities)} in all. Raise "
        "it, add servers, or use shorter documents"
    )


def _home_rows(manifest: Manifest, rank: int | None) -> int:
    """The most q plus k/v rows of a rank's own tasks over the nano-batches."""
    most = 0
    for nano in range(manifest.n_nano_batches):
        document = manifest.segment_document
        own = (manifest.segment_rank == rank) & (manifest.document_nano_batch[document] == nano)
        end = np.zeros(manifest.n_documents, dtype=np.int64)
        np.maximum.at(
            end, document[own], manifest.segment_offset[own] + manifest.segment_length[own]
        )
        most = max(most, int(manifest.segment_length[own].sum() + end.sum()))
    return most


def check_capacity(
    servers: Sequence[PlanningServer], fleet: Fleet, forecast: PhaseForecast
) -> None:
    """Checks the finished plan against the servers' memory."""
    if not fleet.is_limited:
        return
    rows = (forecast.q_rows + forecast.kv_rows).max(axis=0)
    for at in np.flatnonzero(rows > fleet.capacity_rows).tolist():
        raise PlanError(
            f"server {servers[at].server.server_id} would hold {rows[at]} q plus k/v rows, its "
            f"capacity_rows is {servers[at].capacity_rows}: "
            f"{rows[at] - fleet.capacity_rows[at]} rows short"
        )
