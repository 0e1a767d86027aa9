"""State that modules keep on themselves is named where nano-batches mix it, and only there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from trainer_client.step import mixed_state
from trainer_client.step.mixed_state import MixedState


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None
        self.is_off = False
        self.calls = 0


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = _Layer()
        self.losses: list[torch.Tensor] = []
        self.settled = False


Pass = Callable[[_Model], Iterator[None]]
"""The pass of one nano-batch; it gives way where it yields."""


def begins_a_list_anew(model: _Model) -> Iterator[None]:
    model.losses = []
    yield
    model.losses.append(torch.ones(1))
    yield


def empties_the_list(model: _Model) -> Iterator[None]:
    model.losses.append(torch.ones(1))
    yield
    model.losses.clear()
    yield


def keeps_the_last_output(model: _Model) -> Iterator[None]:
    for _ in range(2):
        model.layer.last = torch.ones(1)
        yield


@contextmanager
def off(layer: _Layer) -> Iterator[None]:
    layer.is_off = True
    try:
        yield
    finally:
        layer.is_off = False


def switches_a_layer_off(model: _Model) -> Iterator[None]:
    with off(model.layer):
        yield
    yield


def fills_a_list(model: _Model) -> Iterator[None]:
    """What the training loop reads when all passes are over."""
    for _ in range(2):
        model.losses.append(torch.ones(1))
        yield


def counts_and_settles(model: _Model) -> Iterator[None]:
    for _ in range(2):
        model.layer.calls += 1
        model.settled = True
        yield


def keeps_within_a_turn(model: _Model) -> Iterator[None]:
    """What is read before the pass gives way is nobody else's."""
    with off(model.layer):
        pass
    yield
    yield


def never_gives_way(model: _Model) -> Iterator[None]:
    yield from ()


def run(model: _Model, its: Pass, n: int = 2, mixed: MixedState | None = None) -> MixedState:
    mixed = MixedState(model, n) if mixed is None else mixed
    playing = {i: its(model) for i in range(n)}
    while playing:
        for i, each in list(playing.items()):
            is_over = next(each, "over") == "over"
            mixed.turn_ended(i, is_over=is_over)
            if is_over:
                del playing[i]
    return mixed


@pytest.mark.parametrize(
    ("its", "named"),
    [
        (begins_a_list_anew, ["losses"]),
        (empties_the_list, ["losses"]),
        (keeps_the_last_output, ["layer.last"]),
        (switches_a_layer_off, ["layer.is_off"]),
        (fills_a_list, []),
        (counts_and_settles, []),
        (keeps_within_a_turn, []),
    ],
)
def test_what_is_mixed_is_named(its: Pass, named: list[str]) -> None:
    assert run(_Model(), its).found() == named


@pytest.mark.parametrize("its", [begins_a_list_anew, keeps_the_last_output, empties_the_list])
def test_one_nano_batch_mixes_nothing(its: Pass) -> None:
    assert run(_Model(), its, n=1).found() == []


def test_nobody_mixes_anything_with_passes_that_are_over() -> None:
    """Of nano-batches without rows, which call no core attention, for one."""
    model = _Model()
    mixed = MixedState(model, 2)
    mixed.turn_ended(1, is_over=True)
    its = switches_a_layer_off(model)
    while True:
        is_over = next(its, "over") == "over"
        mixed.turn_ended(0, is_over=is_over)
        if is_over:
            break
    assert mixed.found() == []


def test_the_warning_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run(_Model(), fills_a_list).end()
        assert not caplog.records
        run(_Model(), keeps_the_last_output).end()
    (record,) = caplog.records
    assert "_Model keeps layer.last on its modules" in record.message
    assert "turns=1" in record.message


def watched(model: _Model, its: Pass, n: int = 2) -> bool:
    """Whether the pass is watched, which is run to its end."""
    mixed = mixed_state.watch(model, n)
    if mixed is not None:
        run(model, its, n, mixed).end()
    return mixed is not None


def test_a_model_is_watched_once() -> None:
    model = _Model()
    assert watched(model, fills_a_list)
    assert not watched(model, fills_a_list)
    assert watched(_Model(), fills_a_list)
    assert mixed_state.watch(None, 2) is None


def test_a_pass_in_which_nothing_can_mix_does_not_count() -> None:
    """One nano-batch alone, one that has failed, and passes without core attention."""
    model = _Model()
    assert not watched(model, fills_a_list, n=1)
    assert mixed_state.watch(model, 2) is not None
    assert watched(model, never_gives_way)
    assert watched(model, fills_a_list)
    assert not watched(model, fills_a_list)


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_weights_that_hooks_make_are_nobodys_state(norm: Callable[..., Any]) -> None:
    model = _Model()
    linear = model.layer.linear = norm(nn.Linear(3, 3))

    def passes(model: _Model) -> Iterator[None]:
        for _ in range(2):
            linear(torch.ones(2, 3))
            yield

    assert run(model, passes).found() == []
