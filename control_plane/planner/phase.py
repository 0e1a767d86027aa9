"""One phase of one nano-batch, from segments and servers to tasks: the steps in their order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from control_plane.planner.board import (
    BYTES,
    CHUNKS,
    COST,
    Limits,
    Segments,
)
from control_plane.planner.chunk import CutRules, with_alignment
from control_plane.planner.compiled import compiled, compiled_inner
from control_plane.planner.costs import causal_pairs
from control_plane.planner.exports import Links, Variant, export_surplus
from control_plane.planner.fleet import Fleet
from control_plane.planner.level import expected_growth, find_level, typical_pair_seconds
from control_plane.planner.memory import relieve_memory
from control_plane.planner.opening import limits_after_home_work, open_board
from control_plane.planner.placement import by_pairs, place_homeless
from control_plane.planner.tasks import Tasks, collect_tasks
from core_attention.arrays import Float64Array

CORRECTIONS = 2
"""How often the level is corrected for the rates of the pieces."""
MOST_SHIFTS = 2
"""Shifts of each cut that are tried for small fleets, which are planned several times anyway."""
LARGEST_DRIFT = 1e-2
SMALL_FLEET_DRIFT = 5e-3
"""Relative error of the level that is left uncorrected: time counts more for large fleets."""


class Outcome(NamedTuple):
    """What happened while planning a phase of a nano-batch.

    Attributes:
        level: seconds in which all servers would finish if work could be divided at will.
        scale: factor on the level, for the rates at which pieces run.
        work_ratio: seconds of the plan's tasks to those of the uncut segments at home.
        raised: by how many seconds the cap was raised above (1 + eps) x level; infinite if some
            server stayed above it.
        spent_bytes: bytes moved, beyond what documents that span ranks need anyway.
        n_chunks: pieces that left their home.
        stuck_segment, stuck_end: the first part that fits on no server, else -1.
        stuck_server: a server whose own rank's rows exceed its memory and fit nowhere, else -1.
        n_donors: servers that gave work.
    """

    level: float
    scale: float
    work_ratio: float
    raised: float
    spent_bytes: float
    n_chunks: int
    stuck_segment: int
    stuck_end: int
    stuck_server: int
    n_donors: int


@compiled
def plan_phase(
    segments: Segments,
    home_seconds: Float64Array,
    fleet: Fleet,
    rules: CutRules,
    limits: Limits,
    links: Links,
    tolerance: float,
    n_variants: int,
) -> tuple[Tasks, Outcome]:
    """Plans one phase of one nano-batch.

    Args:
        home_seconds: ``[n_segments]`` of each segment at home.
        limits: what each server and process may take, before any work is given to it.
        n_variants: plans to make; the cheapest that keeps the tolerance best is returned.
    """
    scale = 0.0
    n_shifts = MOST_SHIFTS if n_variants > 1 else 0
    plain = Variant(0, 0.0, n_shifts)
    best = _plan_variant(
        segments,
        home_seconds,
        fleet,
        rules,
        limits,
        links,
        tolerance,
        scale,
        plain,
    )
    largest_drift = SMALL_FLEET_DRIFT if n_variants > 1 else LARGEST_DRIFT
    for _ in range(CORRECTIONS):
        # Pieces run at other rates than whole documents, so cutting changes the mean load.
        drift = best[1].work_ratio / best[1].scale
        if _is_final(best[1]) or abs(drift - 1.0) < largest_drift:
            break
        scale = best[1].work_ratio
        best = _plan_variant(
            segments,
            home_seconds,
            fleet,
            rules,
            limits,
            links,
            tolerance,
            scale,
            plain,
        )
    for seed in range(1, n_variants):
        if _is_final(best[1]) or best[1].n_donors == 0:
            break
        variant = Variant(seed, 0.05 * (1 + seed % 6), seed % (n_shifts + 1))
        other = _plan_variant(
            segments, home_seconds, fleet, rules, limits, links, tolerance, best[1].scale, variant
        )
        if other[1].stuck_server < 0 and _better(other[1], other[2], best[1], best[2]):
            best = other
    return best[0], best[1]


@compiled_inner
def _is_final(outcome: Outcome) -> bool:
    """Whether planning again cannot help: nothing has moved, or something fits nowhere."""
    return outcome.n_chunks == 0 or outcome.stuck_segment >= 0 or outcome.stuck_server >= 0


@compiled_inner
def _better(ours: Outcome, our_cost: float, theirs: Outcome, their_cost: float) -> bool:
    """Whether a plan is cheaper without a higher cap, or has a lower one."""
    margin = 1e-3 * theirs.level
    if ours.raised > theirs.raised + margin:
        return False
    return ours.raised < theirs.raised - margin or our_cost < their_cost


@compiled_inner
def _plan_variant(
    segments: Segments,
    home_seconds: Float64Array,
    fleet: Fleet,
    rules: CutRules,
    limits: Limits,
    links: Links,
    tolerance: float,
    scale: float,
    variant: Variant,
) -> tuple[Tasks, Outcome, float]:
    """One plan, what happened, and its bytes weighted by link. A ``scale`` of 0: estimate it."""
    n_servers, n_ranks = len(fleet.rank), len(fleet.server_of_rank)
    pair_rate = typical_pair_seconds(segments, fleet, rules.phase)
    receives = fleet.receives & (fleet.speed > 0.0)
    load, longest = np.zeros(n_servers), np.zeros(n_servers)
    homeless = np.zeros(len(segments.begin), dtype=np.bool_)
    homeless_pairs = 0.0
    for i in range(len(segments.begin)):
        server = fleet.server_of_rank[segments.rank[i]]
        held = causal_pairs(segments.begin[i], segments.end[i])
        if server >= 0 and fleet.speed[server] > 0.0:
            load[server] += home_seconds[i]
            longest[server] = max(longest[server], segments.end[i])
        else:
            homeless[i] = True
            homeless_pairs += held
    work_before = homeless_pairs + _work(load, pair_rate)
    level = find_level(load, homeless_pairs, pair_rate, receives)
    if scale == 0.0:
        scale = expected_growth(fleet, rules, load, longest, pair_rate, level, work_before)
    level *= scale
    rules = with_alignment(rules, level / pair_rate.min(), segments.end.max())
    cap = np.full(n_servers, level * (1.0 + tolerance))
    cap[fleet.speed == 0.0] = 0.0
    board = open_board(segments, n_ranks, n_servers, load, fleet, cap, homeless, limits.active)
    limits = limits_after_home_work(segments, fleet, board, limits, homeless)
    first_cap = cap.max()
    stuck, stuck_end, stuck_server = -1, 0, -1
    raised = 0.0
    n_donors = 0
    for s in range(n_servers):
        n_donors += board.load[s] > cap[s] * (1.0 + 1e-3) and fleet.rank[s] >= 0
    if homeless_pairs > 0.0:
        order = by_pairs(segments, homeless)
        if receives.any():
            stuck, stuck_end = place_homeless(
                board, segments, fleet, rules, limits, links, cap, receives, pair_rate, order
            )
        else:
            stuck, stuck_end = order[0], segments.end[order[0]]
    if stuck < 0 and limits.active:
        stuck_server = relieve_memory(board, segments, fleet, rules, limits, links, cap, receives)
    if stuck < 0 and stuck_server < 0:
        raised = export_surplus(
            board, segments, fleet, rules, limits, links, cap, receives, pair_rate, variant
        )
        if np.isfinite(raised):
            raised = cap.max() - first_cap
    work_ratio = _work(board.load, pair_rate) / work_before
    outcome = Outcome(
        level,
        scale,
        work_ratio,
        raised,
        board.spent[BYTES],
        board.used[CHUNKS],
        stuck,
        stuck_end,
        stuck_server,
        n_donors,
    )
    return collect_tasks(board, segments, fleet), outcome, board.spent[COST]


@compiled_inner
def _work(load: Float64Array, pair_rate: Float64Array) -> float:
    """The load of all servers in query-key pairs at their typical rates."""
    work = 0.0
    for s in range(len(load)):
        if load[s] > 0.0:
            work += load[s] / pair_rate[s]
    return work
