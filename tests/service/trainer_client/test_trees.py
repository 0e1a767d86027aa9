"""Documents that share a prefix, against each of them alone in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core_attention.manifest import NO_PARENT, RankManifest, Segment
from tests.service.trainer_client.test_parity import PLACEMENTS, make_shape
from tests.support.cluster import Cluster
from tests.support.cut_manifests import pieces
from tests.support.team import Layer, Team


def group(trunk: int, *children: int) -> list[RankManifest]:
    """A trunk and its children, spread over two ranks."""
    held: list[list[Segment]] = [[Segment(0, trunk, 0, trunk)], []]
    for document, rows in enumerate(children, 1):
        child = Segment(document, trunk + rows, trunk, rows, 0, trunk)
        held[document % 2].append(child)
    return [RankManifest(0, rank, [segments, []]) for rank, segments in enumerate(held)]


TWO_RANKS = {
    "parent and child on one rank": pieces("1:0-40/40 2:40-70/70<1@40 |", "9:0-5/5 |"),
    "child on the other rank": pieces("1:0-40/40 |", "2:40-70/70<1@40 |"),
    "branch inside the parent": pieces("1:0-40/40 2:17-50/50<1@17 |", "3:17-18/18<1@17 |"),
    "a chain five deep": pieces(
        "1:0-20/20 3:25-60/60<2@25 5:70-71/71<4@70 |", "2:20-30/30<1@20 4:60-80/80<3@60 |"
    ),
    "a trunk over both ranks": pieces(
        "1:0-100/150 2:150-190/190<1@150 |", "1:100-150/150 3:120-190/190<1@120 4:1-2/2<1@1 |"
    ),
    "of an agent": pieces(
        "1:0-64/64 2:64-96/96<1@64 3:96-97/97<2@96 8:0-7/7 |",
        "4:96-160/160<2@96 5:64-70/70<1@64 6:70-99/99<5@70 7:70-71/71<5@70 |",
    ),
    "an empty prefix": pieces("1:0-9/9 2:0-9/9<1@0 |", "3:0-9/9 |"),
    "60 children": group(50, *[1 + n % 7 for n in range(60)]),
    "in the other nano-batch": pieces(
        "1:0-40/40 2:40-50/50<1@40 | 3:30-60/60<1@30 4:50-70/70<2@50", "9:0-5/5 | 5:40-90/90<1@40"
    ),
    "a trunk cut between nano-batches": pieces(
        "1:0-40/80 2:30-50/50<1@30 | 1:40-60/80 3:70-90/90<1@70", "9:0-5/5 | 1:60-80/80 4:5-9/9<1@5"
    ),
    "a child cut between nano-batches": pieces(
        "1:0-40/40 2:40-50/80<1@40 | 2:70-80/80<1@40", "3:30-70/70<1@30 | 2:50-70/80<1@40"
    ),
}


@st.composite
def random_trees(draw: st.DrawFn, n_ranks: int = 2) -> list[RankManifest]:
    """Documents that branch off earlier ones anywhere, in pieces on random ranks, each in a
    nano-batch or cut between both."""
    packed: list[list[list[Segment]]] = [[[], []] for _ in range(n_ranks)]
    ends: list[tuple[int, int]] = []
    for document in range(draw(st.integers(2, 8))):
        parent, offset, earliest = NO_PARENT, 0, 0
        if document and draw(st.booleans()):
            parent = draw(st.integers(0, document - 1))
            # In nano-batch 0 only what lies there can be carried.
            offset = draw(st.integers(0, ends[parent][1]))
            earliest = int(offset > ends[parent][0])
        pieces = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
        n_first = draw(st.integers(0, len(pieces))) if not earliest else 0
        end, length = offset, offset + sum(pieces)
        for place, piece in enumerate(pieces):
            rank = draw(st.integers(0, n_ranks - 1))
            segment = Segment(document, length, end, piece, parent, offset)
            packed[rank][place >= n_first].append(segment)
            end += piece
        ends.append((offset + sum(pieces[:n_first]) if n_first else -1, length))
    for rank, (_, second) in enumerate(packed):
        second.append(Segment(100 + rank, 2, 0, 2))
    return [
        RankManifest(0, rank, [draw(st.permutations(nano)) for nano in nanos])
        for rank, nanos in enumerate(packed)
    ]


@pytest.fixture(scope="module", params=PLACEMENTS)
def team(request: pytest.FixtureRequest, pool_of_four: Cluster) -> Iterator[Team]:
    with Team(pool_of_four, 2, make_shape(), n_layers=2, placement=request.param) as running:
        yield running


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_windows_and_checkpoints_match_separate_documents(
    pool_of_four: Cluster, placement: str
) -> None:
    """Windows reach across branch points."""
    layers = [Layer(window=16, sinks=True), Layer(), Layer(window=3), Layer()]
    with Team(
        pool_of_four,
        2,
        make_shape(),
        layers=layers,
        serve_windows=True,
        placement=placement,
        checkpointed=True,
    ) as team:
        for case in ("of an agent", "a chain five deep", "in the other nano-batch"):
            team.check(TWO_RANKS[case])


@pytest.mark.parametrize("case", TWO_RANKS)
def test_every_placement_matches_separate_documents(team: Team, case: str) -> None:
    team.check(TWO_RANKS[case])


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(manifests=random_trees(), seed=st.integers(0, 2**16))
def test_random_trees_and_plans_match_separate_documents(
    team: Team, manifests: list[RankManifest], seed: int
) -> None:
    team.check(manifests, seed=seed)
