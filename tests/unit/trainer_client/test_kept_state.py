"""Forwards of probes and checks leave a model as it was."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.process_groups import process_group
from trainer_client.hooks.kept_state import state_kept, untouched


class _Keeps(nn.Module):
    """Leaves on itself what models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.losses: Any = None
        self.calls = 0
        self.last = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        self.calls += 1
        self.last = y
        self.made_in_the_pass = y
        losses = self.losses
        if isinstance(losses, list | deque):
            losses.append(y)
        elif isinstance(losses, set):
            losses.add("new")
        elif losses is not None:
            losses["new"] = 1
        return y


@pytest.mark.parametrize(
    "container",
    [
        ["old"],
        {"old": 1},
        {"old"},
        OrderedDict(old=1),
        defaultdict(int, old=1),
        Counter(old=1),
        deque(["old"], maxlen=1),
    ],
    ids=lambda container: type(container).__name__,
)
def test_what_modules_keep_on_themselves_is_put_back(container: Any) -> None:
    model = nn.Sequential(_Keeps(), _Keeps())
    for layer in model:
        layer.losses = container
    kept = dict(model[0].__dict__)
    before = container.copy()
    with untouched(model):
        model.eval()
        model(torch.ones(2, 3))
        assert container != before
    for layer in model:
        assert layer.losses is container
        assert layer.calls == 0
        assert layer.training
        assert not hasattr(layer, "made_in_the_pass")
    assert container == before
    assert list(kept) == list(model[0].__dict__)
    assert all(value is model[0].__dict__[name] for name, value in kept.items())


class _Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(()) * random.random() * float(np.random.rand())


def test_no_random_number_is_used_up() -> None:
    def next_numbers() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    expected = next_numbers()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    model = _Draws()
    with untouched(model):
        model(torch.ones(1))
    assert next_numbers() == expected


def test_hooks_that_collect_outputs_leave_none() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model.aux = []
    for layer in model:
        layer.register_forward_hook(lambda _, inputs, output: model.aux.append(output.mean()))
    with untouched(model):
        model(torch.ones(2, 3))
        assert len(model.aux) == 2
    assert model.aux == []
    model(torch.ones(2, 3))
    assert len(model.aux) == 2


def test_a_lazy_module_stays_what_it_has_become() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with untouched(model):
        model(torch.ones(2, 3))
    assert type(model[0]) is nn.Linear
    assert model[0].in_features == 3
    assert model(torch.ones(2, 3)).shape == (2, 4)


class _BuildsItself(nn.Module):
    def __init__(self, made: str) -> None:
        super().__init__()
        self.made, self.is_built, self.calls = made, False, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if not self.is_built:
            if self.made == "parameter":
                self.weight = nn.Parameter(torch.ones(3))
            elif self.made == "child":
                self.child = nn.Linear(3, 3)
            else:
                self.register_forward_hook(lambda module, inputs, output: output + 1)
            self.is_built = True
        return x


@pytest.mark.parametrize("made", ["parameter", "child", "hook"])
def test_a_module_builds_itself_once(made: str) -> None:
    """Otherwise an optimiser that was made after the probe would hold other weights."""
    layer = _BuildsItself(made)
    model = nn.Sequential(layer)
    with untouched(model):
        model(torch.ones(2, 3))
    built = list(layer.parameters())
    model(torch.ones(2, 3))
    assert layer.is_built
    assert all(one is other for one, other in zip(built, layer.parameters(), strict=True))
    assert len(layer._forward_hooks) == (made == "hook")


def test_replicas_with_static_graphs_go_on(tmp_path: Path) -> None:
    """Their attributes follow what the reducer has counted."""
    with process_group(tmp_path):
        model = DistributedDataParallel(nn.Linear(3, 3), static_graph=True)
        with state_kept(model):
            model(torch.ones(2, 3)).sum().backward()
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
        assert model.module.bias.grad.tolist() == [2.0, 2.0, 2.0]
