"""Which chunk a receiver takes."""

from __future__ import annotations

from core_attention.manifest import Manifest, RankManifest, Segment
from tests.service.control_plane.planner.small_plans import (
    LONG,
    PROFILE,
    SHORT,
    manifest_of,
    plan_of,
    rows_moved,
)
from tests.support.planning_cases import in_place


def test_what_moves_is_a_short_chunk_from_the_middle_of_a_giant_document() -> None:
    """Its end moves as many queries for as much work, but more keys."""
    manifest = manifest_of([[1 << 20], *([[LONG * 4]] * 15)])
    plan = plan_of(manifest, in_place(16, profile=PROFILE))
    giant = plan.forward.document == 0
    away = giant & (plan.forward.server != 0)
    assert away.sum() >= 8
    assert plan.forward.q_end[away].min() < 1 << 19


def test_a_receiver_prefers_keys_that_it_has() -> None:
    """Rank 1 has the end of the document that spans ranks 0 and 1, so its keys are there."""
    whole = LONG * 2
    ranks = [
        RankManifest(
            0,
            0,
            ((Segment(0, whole, 0, whole - SHORT), Segment(1, whole - SHORT, 0, whole - SHORT)),),
        ),
        RankManifest(0, 1, ((Segment(0, whole, whole - SHORT, SHORT),),)),
    ]
    plan = plan_of(Manifest.merge(ranks, 2), in_place(2, profile=PROFILE))
    moved = plan.forward.document[plan.forward.server == 1]
    assert set(moved.tolist()) == {0}


def test_a_receiver_prefers_work_of_its_own_host() -> None:
    lengths = [[LONG], [SHORT], [LONG], [SHORT]]
    servers = in_place(4, profile=PROFILE, servers_per_host=2)
    assert set(rows_moved(plan_of(manifest_of(lengths), servers))) == {(0, 1), (2, 3)}
