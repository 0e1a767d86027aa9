"""Small steps, planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from control_plane.planner.planners import PLANNERS
from control_plane.planner.planning import PlanningOptions, PlanningServer
from core_attention.manifest import Manifest, RankManifest
from core_attention.plan import Plan
from tests.support.planning_cases import SHAPE, uniform_profile

PROFILE = uniform_profile()
"""Seconds are proportional to query-key pairs."""
LONG, SHORT = 1 << 15, 1 << 10


def manifest_of(lengths: Sequence[Sequence[int]]) -> Manifest:
    """Whole documents by rank."""
    ranks = [RankManifest.from_lengths(0, rank, [own]) for rank, own in enumerate(lengths)]
    return Manifest.merge(ranks, len(ranks))


def plan_of(
    manifest: Manifest, servers: Sequence[PlanningServer], *, tolerance: float = 0.05
) -> Plan:
    options = PlanningOptions(tolerance=tolerance)
    return PLANNERS["balanced"](manifest, list(servers), SHAPE, options)


def rows_moved(plan: Plan) -> Counter[tuple[int, int]]:
    """Query rows by (home, server), of tasks that run elsewhere."""
    moved: Counter[tuple[int, int]] = Counter()
    manifest, tasks = plan.manifest, plan.forward
    for document, begin, end, server in zip(
        tasks.document, tasks.q_begin, tasks.q_end, tasks.server, strict=True
    ):
        for at in range(manifest.first_segment[document], manifest.first_segment[document + 1]):
            low = int(manifest.segment_offset[at])
            rows = min(end, low + manifest.segment_length[at]) - max(begin, low)
            home = int(manifest.segment_rank[at])
            if rows > 0 and plan.servers[server].in_place_rank != home:
                moved[home, int(server)] += int(rows)
    return moved
