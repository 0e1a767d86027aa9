"""Layers at home over documents that are cut, without any server: parity with float64."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_attention.errors import ManifestError
from core_attention.manifest import Manifest, RankManifest, Segment
from tests.support.cluster import NODE_SHAPE as SHAPE
from tests.support.cut_manifests import in_halves, pieces
from tests.support.team import Layer, Layers, Rows, compare, computed_rows, random_rows
from trainer_client import SessionError
from trainer_client.step.lane import current_step, in_nano_batch
from trainer_client.step.running_step import RunningStep

WINDOW = 16

LAYERS = [
    Layer(window=WINDOW, sinks=True, softcap=1.5),
    Layer(chunk=WINDOW, sinks=True),
    Layer(window=1),
    Layer(window=2),
    Layer(window=200),
    Layer(chunk=31, softcap=2.0),
]

ONE_RANK = {
    "one token each": in_halves(1, 2),
    "a window's length": in_halves(1, 2 * WINDOW),
    "one less": in_halves(1, 2 * WINDOW - 2),
    "one more": in_halves(1, 2 * WINDOW + 2),
    "long": in_halves(1, 301),
    "among others": in_halves(1, 40, 3, 120, 2, 1),
    "cut after its first token": pieces("1:0-1/90 | 1:1-90/90 2:0-3/3"),
    "cut before its last token": pieces("1:0-89/90 | 2:0-3/3 1:89-90/90"),
    "many, in pieces and in any order": pieces(
        "9:20-25/50 2:0-30/31 9:0-20/50 | 9:33-50/50 2:30-31/31 1:0-1/1 9:25-33/50"
    ),
    "pieces shorter than the window": [
        RankManifest(
            0,
            0,
            (
                [Segment(1, 60, at, 3) for at in range(0, 30, 3)],
                [Segment(1, 60, at, 5) for at in (45, 30, 55, 35, 50, 40)],
            ),
        )
    ],
}


class Steps:
    """The ranks of a step, one after another: nothing goes from one to another.

    Args:
        manifests: of all ranks.
        layers: of the model; none is served.
        checkpointed: every layer is an activation checkpoint.
    """

    def __init__(
        self,
        manifests: Sequence[RankManifest],
        layers: Sequence[Layer] = LAYERS,
        *,
        checkpointed: bool = False,
    ) -> None:
        self.manifests = manifests
        self.layers = layers
        self.model = Layers(layers, checkpointed=checkpointed)
        self.rows: dict[tuple[int, int, int], Rows] = {}
        plan: Any = SimpleNamespace(step=0, manifest=Manifest.merge(manifests, len(manifests)))
        nobody: Any = SimpleNamespace()  # nothing is sent
        job: Any = SimpleNamespace(
            shape=SHAPE, scale=SHAPE.default_softmax_scale, n_nano_batches=2, windows=()
        )
        self.running = [
            RunningStep(
                plan,
                job=job,
                rank=rank,
                device=torch.device("cpu"),
                forward_only=False,
                ticks=nobody,
            )
            for rank in range(len(manifests))
        ]

    def check(self, seed: int = 0) -> None:
        """Runs the step and compares every element with the reference."""
        for rank, manifest in enumerate(self.manifests):
            self.run(rank, [manifest.tokens(nano_batch) for nano_batch in range(2)], seed)
        for layer, kind in enumerate(self.layers):
            compare(self.manifests, self.rows, layer, kind, SHAPE, SHAPE.default_softmax_scale)

    def run(self, rank: int, n_rows: Sequence[int], seed: int = 0) -> None:
        """Runs the step of one rank, nano-batch 0 first."""
        generator = torch.Generator().manual_seed(seed * 1000 + rank)
        given = [
            [random_rows(SHAPE, n, generator, kind, torch.device("cpu")) for kind in self.layers]
            for n in n_rows
        ]
        outputs = [self.forward(rank, nano_batch, rows) for nano_batch, rows in enumerate(given)]
        torch.autograd.backward(
            [o for of_nano in outputs for o in of_nano],
            [rows["do"] for of_nano in given for rows in of_nano],
        )
        for nano_batch, (of_layers, os) in enumerate(zip(given, outputs, strict=True)):
            for layer, (rows, o) in enumerate(zip(of_layers, os, strict=True)):
                self.rows[rank, nano_batch, layer] = computed_rows(rows, o)

    def forward(self, rank: int, nano_batch: int, rows: Sequence[Rows]) -> list[torch.Tensor]:
        """The outputs of the layers of a nano-batch."""
        token = current_step.set(self.running[rank])
        try:
            with in_nano_batch(nano_batch):
                outputs: list[torch.Tensor] = self.model(rows)
                return outputs
        finally:
            current_step.reset(token)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("case", ONE_RANK)
def test_documents_in_both_nano_batches_match_the_reference(case: str, checkpointed: bool) -> None:
    Steps(ONE_RANK[case], checkpointed=checkpointed).check()


def test_pieces_of_a_rank_need_nothing_of_those_that_chunks_part_from_them() -> None:
    """Document 1 is over two ranks, cut at chunks between them and anywhere within each."""
    manifests = pieces("1:0-17/100 1:17-32/100 |", "1:50-100/100 1:32-50/100 |")
    Steps(manifests, [Layer(chunk=16), Layer(chunk=32)]).check()


@st.composite
def pieces_on_one_rank(draw: st.DrawFn) -> list[RankManifest]:
    """Documents in pieces, in any order, the first ones in nano-batch 0."""
    nano_batches: list[list[Segment]] = [[], [Segment(100, 2, 0, 2)]]
    for document in range(draw(st.integers(1, 4))):
        pieces = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
        n_first, offset = draw(st.integers(0, len(pieces))), 0
        for place, piece in enumerate(pieces):
            segment = Segment(document, sum(pieces), offset, piece)
            nano_batches[place >= n_first].append(segment)
            offset += piece
    return [RankManifest(0, 0, [draw(st.permutations(nano)) for nano in nano_batches])]


@settings(max_examples=30, deadline=None)
@given(
    manifests=pieces_on_one_rank(),
    layer=st.one_of(
        st.builds(Layer, window=st.integers(1, 70)), st.builds(Layer, chunk=st.integers(1, 70))
    ),
)
def test_random_pieces_and_kinds_match_the_reference(
    manifests: list[RankManifest], layer: Layer
) -> None:
    Steps(manifests, [layer]).check()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layer", [Layer(window=8), Layer(chunk=30)])
def test_documents_that_are_cut_between_ranks_inside_a_window_are_refused(
    layer: Layer, rank: int
) -> None:
    """On both ranks, so that none waits for the other."""
    steps = Steps(pieces("1:0-20/40 |", "1:20-40/40 |"), [layer])
    rows = random_rows(SHAPE, 20, torch.Generator(), Layer(), torch.device("cpu"))
    with pytest.raises(ManifestError):
        steps.forward(rank, 0, [rows])


def test_nano_batches_in_the_wrong_order_are_refused() -> None:
    steps = Steps(in_halves(1, 40), [Layer(window=8)])
    rows = random_rows(SHAPE, 20, torch.Generator(), Layer(), torch.device("cpu"))
    with pytest.raises(SessionError):
        steps.forward(0, 1, [rows])


def outputs_of_both() -> tuple[torch.Tensor, torch.Tensor]:
    """Of the nano-batches of one document, in a layer with a window."""
    steps = Steps(in_halves(1, 40), [Layer(window=8)])
    generator = torch.Generator().manual_seed(0)
    first, second = (
        steps.forward(0, nano, [random_rows(SHAPE, 20, generator, Layer(), torch.device("cpu"))])[0]
        for nano in range(2)
    )
    return first, second


def test_backward_of_nano_batch_0_alone_is_refused() -> None:
    """Its gradients would lack nano-batch 1's share."""
    first, _ = outputs_of_both()
    with pytest.raises(SessionError):
        first.sum().backward()


@pytest.mark.parametrize("again", [0, 1])
def test_a_second_backward_is_refused(again: int) -> None:
    outputs = outputs_of_both()
    (outputs[0].sum() + outputs[1].sum()).backward(retain_graph=True)
    with pytest.raises(SessionError):
        outputs[again].sum().backward()
