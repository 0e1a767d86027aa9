"""Gradients of weights that are put off: when, which, and that they are those of one backward."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer_client import SessionError, defer_weights
from trainer_client.pipelines.deferred_weights import DeferredWeights


class Special(nn.Linear):
    """It may compute anything."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Named(nn.Linear):
    """A subclass that computes what ``nn.Linear`` does, as torchtitan's."""


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(6), nn.Linear(6, 10)
        self.frozen, self.narrow = nn.Linear(10, 10, bias=False), Special(10, 3)
        self.frozen.requires_grad_(requires_grad=False)
        self.last = Named(3, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.narrow(self.frozen(torch.relu(self.wide(self.norm(x))))))
        return out


class Stage:
    """What of a ``PipelineStage`` matters here."""

    def __init__(self, module: nn.Module, deferred: DeferredWeights) -> None:
        self.submod, self.later = module, dict[int, Any]()
        self._deferred, self.outputs = deferred, dict[int, torch.Tensor]()

    def backward_one_chunk(
        self, chunk: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self.outputs.pop(chunk).square().sum().backward()
        run = self._deferred()
        if full_backward:
            run()
        else:
            self.later[chunk] = run


Given = tuple[Mixed, Mixed, Stage, torch.Tensor]


@pytest.fixture
def given() -> Given:
    """A model, a copy whose weights are put off, its stage, and inputs."""
    torch.manual_seed(0)
    plain = Mixed()
    other = copy.deepcopy(plain)
    deferred = defer_weights(other)
    stage = Stage(other, deferred)
    deferred.watch(stage)
    return plain, other, stage, torch.randn(3, 4, 5, 6)


def with_gradient(module: nn.Module) -> set[str]:
    return {name for name, p in module.named_parameters() if p.grad is not None}


def test_what_is_put_off_is_added_later(given: Given) -> None:
    plain, other, stage, inputs = given
    first, second = (rows.clone().requires_grad_() for rows in inputs[:2])
    stage.outputs = {0: other(first), 1: other(second)}
    for chunk in (0, 1):
        stage.backward_one_chunk(chunk, full_backward=False)
    at_once = {"norm.weight", "norm.bias", "wide.bias", "narrow.weight", "narrow.bias"}
    assert with_gradient(other) == at_once
    expected = [rows.clone().requires_grad_() for rows in inputs[:2]]
    for rows in expected:
        plain(rows).square().sum().backward()
    assert torch.equal(first.grad, expected[0].grad)
    assert torch.equal(second.grad, expected[1].grad)
    stage.later[0]()
    assert with_gradient(other) == at_once | {"wide.weight", "last.weight"}
    stage.later[1]()
    for (name, found), wanted in zip(other.named_parameters(), plain.parameters(), strict=True):
        if wanted.grad is None:
            assert found.grad is None, name
            continue
        # One product of float32 is added in another order.
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-6, atol=1e-6, msg=name)


def test_whole_backwards_and_those_outside_of_stages_put_nothing_off(given: Given) -> None:
    plain, other, stage, inputs = given
    stage.outputs = {0: other(inputs[0])}
    stage.backward_one_chunk(0)
    other(inputs[1]).square().sum().backward()
    assert not stage.later
    for rows in inputs[:2]:
        plain(rows).square().sum().backward()
    for found, wanted in zip(other.parameters(), plain.parameters(), strict=True):
        if wanted.grad is not None:
            assert torch.equal(found.grad, wanted.grad)  # type: ignore[arg-type]


def test_a_backward_that_fails_puts_nothing_off_afterwards(given: Given) -> None:
    _, other, stage, inputs = given
    with pytest.raises(KeyError):
        stage.backward_one_chunk(7, full_backward=False)
    other(inputs[0]).square().sum().backward()
    assert "wide.weight" in with_gradient(other)


def test_layers_under_autocast_compute_theirs_at_once(given: Given) -> None:
    _, other, stage, inputs = given
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stage.outputs = {0: other(inputs[0])}
    stage.backward_one_chunk(0, full_backward=False)
    assert {"wide.weight", "last.weight"} <= with_gradient(other)


def test_weights_that_somebody_else_watches_are_left_alone() -> None:
    """Their gradients come at once, through whatever is to see them."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5)))
    seen: list[str] = []

    def doubled(gradient: torch.Tensor) -> torch.Tensor:
        seen.append("hook")
        return 2 * gradient

    def prepared(model: nn.Sequential) -> nn.Sequential:
        layers: list[Any] = list(model)
        layers[0].weight.register_hook(doubled)
        layers[1].weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
        with warnings.catch_warnings(action="ignore"):
            nn.utils.weight_norm(layers[2])
        forward = layers[3].forward
        layers[3].forward = lambda x: 3 * forward(x)
        return model

    other = prepared(copy.deepcopy(plain))
    plain = prepared(plain)
    deferred = defer_weights(other)
    stage = Stage(other, deferred)
    deferred.watch(stage)
    x = torch.randn(7, 4)
    plain(x).square().sum().backward()
    assert sorted(seen) == ["accumulated", "hook"]
    stage.outputs = {0: other(x)}
    stage.backward_one_chunk(0, full_backward=False)
    assert sorted(seen) == ["accumulated", "accumulated", "hook", "hook"]
    missing = {name for name, p in other.named_parameters() if p.grad is None}
    assert missing == {"4.weight"}
    stage.later[0]()
    for (name, found), wanted in zip(other.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-6, atol=1e-6, msg=name)


def test_without_gradients_it_is_the_same_layer(given: Given) -> None:
    plain, other, _, inputs = given
    with torch.no_grad():
        assert torch.equal(other(inputs[0]), plain(inputs[0]))


@pytest.mark.usefixtures("alone")
def test_replicas_by_ddp_are_refused() -> None:
    replicated = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(SessionError):
        defer_weights(nn.Sequential(replicated))
    deferred = defer_weights(nn.Linear(2, 2))
    with pytest.raises(SessionError):
        deferred.watch(SimpleNamespace(submod=replicated))
