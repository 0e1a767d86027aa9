"""Documents that begin in nano-batch 0 and go on in nano-batch 1, against the float64 reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core_attention.ca_task import MaskKind
from core_attention.manifest import RankManifest, Segment
from tests.service.trainer_client.test_parity import PLACEMENTS, make_shape
from tests.support.cluster import Cluster
from tests.support.cut_manifests import in_halves, pieces
from tests.support.team import Layer, Team
from trainer_client import SessionError, SessionOptions, core_attention, in_nano_batch
from trainer_client.turns.branches import RowDocuments
from trainer_client.turns.manifests import manifest_of_forward

TWO_RANKS = {
    "one document": in_halves(2, 307),
    "of four tokens": in_halves(2, 4),
    "cut after its first token": pieces("1:0-1/300 | 1:1-151/300", "2:0-5/5 | 1:151-300/300"),
    "cut before its last token": pieces("1:0-150/300 | 1:299-300/300", "1:150-299/300 | 2:0-5/5"),
    "each rank cuts one of its own": pieces(
        "1:0-3/3 2:0-97/200 | 2:97-200/200 3:0-64/64", "4:0-128/129 | 5:0-7/7 4:128-129/129"
    ),
    "many cut documents, in any order": pieces(
        "9:0-20/50 2:0-30/31 4:0-40/90 | 4:61-90/90 9:33-50/50 1:0-1/1",
        "4:40-50/90 9:20-25/50 | 9:25-33/50 2:30-31/31 4:50-61/90",
    ),
    "many tiny documents": in_halves(2, *[1, 2, 3, 1, 5] * 8, 64, *[2, 1] * 10),
}


@pytest.fixture(scope="module", params=PLACEMENTS)
def team(request: pytest.FixtureRequest, pool_of_four: Cluster) -> Iterator[Team]:
    with Team(pool_of_four, 2, make_shape(), n_layers=2, placement=request.param) as running:
        yield running


@pytest.mark.parametrize("case", TWO_RANKS)
def test_every_placement_matches_the_reference(team: Team, case: str) -> None:
    team.check(TWO_RANKS[case])


def in_pairs(*steps: list[RankManifest]) -> list[RankManifest]:
    """One step of as many pairs of nano-batches as there are ``steps`` of two, on the same ranks;
    with ids that all of them have, of other documents."""
    return [
        RankManifest(
            0,
            rank,
            [
                [
                    replace(segment, document_id=segment.document_id + 1000 * pair)
                    for segment in nano
                ]
                for pair, step in enumerate(steps)
                for nano in step[rank].nano_batches
            ],
        )
        for rank in range(len(steps[0]))
    ]


@pytest.mark.parametrize(
    ("placement", "checkpointed"),
    [("pool", True), ("pool", False), ("in-place", False), ("mixed", True)],
)
def test_every_pair_of_nano_batches_matches_the_reference(
    pool_of_four: Cluster, placement: str, checkpointed: bool
) -> None:
    """As steps of gradient accumulation have them."""
    layers = [Layer(window=16, sinks=True), Layer(), Layer(window=5), Layer()]
    with Team(
        pool_of_four,
        2,
        make_shape(),
        layers=layers,
        serve_windows=True,
        n_nano_batches=6,
        placement=placement,
        checkpointed=checkpointed,
    ) as team:
        for between in ("each rank cuts one of its own", "many cut documents, in any order"):
            team.check(in_pairs(in_halves(2, 151), TWO_RANKS[between], in_halves(2, 9, 4, 1)))


@st.composite
def rank_manifests(draw: st.DrawFn, n_ranks: int = 2) -> list[RankManifest]:
    """Random documents over random ranks, many of them cut between the nano-batches."""
    packed: list[list[list[Segment]]] = [[[], []] for _ in range(n_ranks)]
    for document in range(draw(st.integers(1, 6))):
        pieces = draw(st.lists(st.integers(1, 70), min_size=1, max_size=5))
        n_first = draw(st.integers(0, len(pieces)))
        offset, length = 0, sum(pieces)
        for place, piece in enumerate(pieces):
            rank = draw(st.integers(0, n_ranks - 1))
            packed[rank][place >= n_first].append(Segment(document, length, offset, piece))
            offset += piece
    for rank, (_, second) in enumerate(packed):
        second.append(Segment(100 + rank, 2, 0, 2))
    return [
        RankManifest(0, rank, [draw(st.permutations(nano)) for nano in nanos])
        for rank, nanos in enumerate(packed)
    ]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(manifests=rank_manifests(), seed=st.integers(0, 2**16))
def test_random_manifests_and_plans_match_the_reference(
    team: Team, manifests: list[RankManifest], seed: int
) -> None:
    team.check(manifests, seed=seed)


class Steps:
    """One rank with one document over both nano-batches, for loops of one's own."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.rows = [
            [torch.randn(20, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
            for _ in range(2)
        ]

    def attend(self, nano_batch: int) -> torch.Tensor:
        with in_nano_batch(nano_batch):
            q, k, v = self.rows[nano_batch]
            return core_attention(q, k, v).sum()


@pytest.fixture
def one_rank(pool_of_four: Cluster) -> Iterator[Steps]:
    with Team(pool_of_four, 1, make_shape(), placement="in-place") as team:
        yield Steps(team)


@pytest.mark.parametrize("later", [False, True])
def test_backward_of_nano_batch_0_alone_is_refused(one_rank: Steps, later: bool) -> None:
    """Its gradients would lack nano-batch 1's share, whether that has been computed yet or not."""

    def run() -> None:
        with one_rank.team.sessions[0].step(0):
            first = one_rank.attend(0)
            if later:
                first.backward()
            one_rank.attend(1)
            first.backward()

    one_rank.team.submit(in_halves(1, 40))
    with pytest.raises(SessionError):
        run()


@pytest.mark.parametrize(
    ("lengths", "halves"),
    [
        ([7], [[(0, 0, 4)], [(0, 4, 3)]]),
        ([1], [[(0, 0, 1)], []]),
        ([2, 2], [[(0, 0, 2)], [(1, 0, 2)]]),
        ([1, 6, 2], [[(0, 0, 1), (1, 0, 4)], [(1, 4, 2), (2, 0, 2)]]),
    ],
)
def test_a_packed_row_is_split_in_its_middle(
    lengths: list[int], halves: list[list[tuple[int, int, int]]]
) -> None:
    options = SessionOptions(
        control_plane="here:1", job="a", rank=1, n_ranks=2, n_layers=1, shape=make_shape(),
        n_nano_batches=6, cut_documents=True, data_host="127.0.0.1",
    )  # fmt: skip
    manifest = manifest_of_forward(3, options, RowDocuments(lengths), range(2, 4))
    first = 1 << 32
    assert [
        [(s.document_id - first, s.offset, s.length) for s in segments]
        for segments in manifest.nano_batches
    ] == [[], [], *halves, [], []]
    assert all(
        s.document_length == lengths[s.document_id - first] for s in chain(*manifest.nano_batches)
    )


@pytest.mark.parametrize(
    "options",
    [{"n_nano_batches": 1}, {"shape": replace(make_shape(), mask=MaskKind.FULL)}],
)
def test_options_that_cannot_cut_documents_are_refused(options: dict[str, Any]) -> None:
    settings = {"shape": make_shape(), **options}
    with pytest.raises(ValueError):
        SessionOptions(
            control_plane="here:1", job="a", rank=0, n_ranks=1, n_layers=1, cut_documents=True,
            data_host="127.0.0.1", **settings,
        )  # fmt: skip
