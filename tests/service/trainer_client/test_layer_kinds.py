"""Layers with windows, chunks, sinks and softcaps: gradient parity with the float64 reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core_attention.ca_task import MaskKind
from core_attention.errors import TensorError
from tests.service.trainer_client.test_parity import CASES, lengths, make_shape, spanning
from tests.support.cluster import Cluster
from tests.support.team import Layer, Team
from trainer_client import SessionError
from trainer_client.step.home_tasks import LayerKind
from trainer_client.step.sinks import with_sinks

WINDOW = 16

LAYERS = [
    Layer(window=WINDOW),
    Layer(),
    Layer(chunk=WINDOW, sinks=True),
    Layer(sinks=True),
    Layer(window=1, softcap=2.0),
]
"""Served and home layers in turns, as hybrids have them."""

AROUND_THE_WINDOW = lengths(
    ([1, WINDOW - 1, WINDOW, 90], [WINDOW + 1, 200]), ([3 * WINDOW, 2], [130, 1, 129])
)


@pytest.mark.parametrize("placement", ["pool", "in-place"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_kinds_of_layers_match_the_reference(
    pool_of_four: Cluster, placement: str, checkpointed: bool
) -> None:
    with Team(
        pool_of_four,
        2,
        make_shape(),
        layers=LAYERS,
        placement=placement,
        checkpointed=checkpointed,
    ) as team:
        for manifests in (
            AROUND_THE_WINDOW,
            CASES["an empty nano-batch"],
            CASES["many tiny documents"],
        ):
            team.check(manifests)


@pytest.mark.parametrize("interleave", [True, False])
def test_a_document_over_all_ranks_is_cut_at_chunks(
    pool_of_four: Cluster, interleave: bool
) -> None:
    layers = [Layer(chunk=100), Layer(sinks=True), Layer(window=1)]
    with Team(pool_of_four, 2, make_shape(), layers=layers, interleave=interleave) as team:
        team.check(spanning(2, 400))  # Ranks are cut at a chunk's border.


@pytest.mark.parametrize("head_groups", [1, 2])
def test_a_softcap_is_applied_by_servers_and_audited(
    pool_of_four: Cluster, head_groups: int
) -> None:
    shape = replace(make_shape(), softcap=1.5)
    with Team(
        pool_of_four,
        2,
        shape,
        head_groups=head_groups,
        layers=[Layer(), Layer(window=WINDOW)],
        placement="mixed",
        audit_rate=1.0,
    ) as team:
        team.check(AROUND_THE_WINDOW)
    with Team(
        pool_of_four,
        2,
        shape,
        head_groups=head_groups,
        layers=[Layer(sinks=True)],
        placement="pool",
    ) as team:
        team.check(spanning(2, 307))


@pytest.mark.parametrize(("placement", "planner"), [("pool", "random"), ("in-place", "balanced")])
def test_bidirectional_documents_match_the_reference(
    pool_of_four: Cluster, placement: str, planner: str
) -> None:
    shape = replace(make_shape(), mask=MaskKind.FULL)
    with Team(
        pool_of_four,
        2,
        shape,
        n_layers=2,
        placement=placement,
        planner=planner,
        audit_rate=1.0,
        min_forward_tokens=16,
        min_backward_tokens=16,
    ) as team:
        for case in ("odd lengths", "many tiny documents", "one document over all ranks"):
            team.check(CASES[case])
        team.check(lengths(([600, 120], [300]), ([80, 40], [60, 2, 1])))


def test_a_layer_that_servers_compute_otherwise_is_refused(pool_of_four: Cluster) -> None:
    with (
        Team(pool_of_four, 1, make_shape(), layers=[Layer(softcap=30.0)]) as team,
        pytest.raises(SessionError),
    ):
        team.run(lengths(([5], [5])))


@pytest.mark.parametrize(
    "kind", [{"window": 0}, {"window": -1}, {"chunk": 2.0}, {"window": 4, "chunk": 4}]
)
def test_windows_that_are_none_are_refused(kind: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        LayerKind(**kind)


def test_sinks_are_one_a_head() -> None:
    o, lse = torch.zeros(3, 4, 8), torch.zeros(3, 4)
    with pytest.raises(TensorError):
        with_sinks(o, lse, torch.zeros(2))


def test_the_gradient_of_sinks_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(*size, generator=generator, dtype=torch.float32).requires_grad_()
        for size in ((5, 3, 2), (5, 3), (3,))
    ]
    twins = [tensor.detach().double().requires_grad_() for tensor in inputs]
    do = torch.randn(5, 3, 2, generator=generator)
    o, lse, sinks = twins
    expected = o * torch.sigmoid(lse - sinks)[..., None]
    result = with_sinks(*inputs)
    result.backward(do)
    expected.backward(do.double())
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-7)
    for tensor, twin in zip(inputs, twins, strict=True):
        assert tensor.grad is not None
        assert twin.grad is not None
        # A few float32 roundings of numbers of size 1.
        torch.testing.assert_close(tensor.grad.double(), twin.grad, rtol=1e-5, atol=1e-6)
