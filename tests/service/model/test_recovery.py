"""The protocol of docs/fault_tolerance.md, in every order in which its events can happen.

What is proved, within the bounds of each setting: no tick is completed with results of two epochs,
nor with a piece's result missing or counted twice; rows that have to be sent again are still there;
a fault leads to one recovery at most; nothing ever gets stuck. That the model can see mistakes is
proved by breaking the rules one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.service.model.explorer import Exploration, ModelViolation, explore
from tests.service.model.protocol import Model
from tests.service.model.setting import Document, Rules, Setting
from trainer_client.machine.instructions import CloseConnections
from trainer_client.machine.lane import LaneMachine
from trainer_client.machine.rank import RankMachine
from trainer_client.machine.step import State, StepMachine

PAIR = Setting(documents=(Document(0, (0, 1)),))
"""One document over two ranks."""

CHAIN = replace(PAIR, n_ranks=3, documents=(Document(0, (0, 1)), Document(0, (1, 2))))
"""Each rank shares a document with the next one only."""

TRIPLE = replace(PAIR, n_ranks=3, documents=(Document(0, (0, 1, 2)),))
"""One document over three ranks, of which one gives only keys to the first server."""

LANES = replace(PAIR, n_lanes=2, documents=(Document(0, (0, 1)), Document(1, (0, 1))))
"""Two nano-batches that take turns."""

CROSSED = replace(LANES, documents=(Document(0, (0, 1)), Document(1, (1, 0))))
"""Each rank holds the head of a document in one lane and the tail in the other."""

SETTINGS = {
    "a server dies": replace(CHAIN, crashes=1),
    "two servers die": replace(PAIR, crashes=2),
    "a server is cut off": replace(PAIR, cuts=1),
    "the only server is cut off, and dies": replace(PAIR, n_servers=1, crashes=1, cuts=1),
    "two layers": replace(PAIR, n_layers=2, crashes=1),
    "groups of heads": replace(PAIR, n_layers=4, head_groups=2, crashes=1),
    "heads and tails": replace(CROSSED, n_layers=2, crashes=1),
    "three ranks of one document": replace(TRIPLE, crashes=1),
    "the control plane dies": replace(PAIR, restarts=1),
    "two steps": replace(PAIR, n_steps=2, crashes=1),
}

SLOW_THREADS = {
    "a server dies": replace(PAIR, crashes=1, threads=True),
    "two layers": replace(PAIR, n_layers=2, crashes=1, threads=True),
    "the control plane dies": replace(PAIR, restarts=1, threads=True),
}

BROKEN_RULES = {
    "first_tick_is_least": replace(PAIR, crashes=1),
    "wait_for_all_answers": replace(PAIR, crashes=1),
    "servers_refuse_old": replace(PAIR, crashes=1),
    "epochs_survive": replace(PAIR, restarts=1),
    "lanes_are_independent": replace(LANES, crashes=1),
    "old_reports_change_nothing": replace(PAIR, crashes=1),
}

Break = Callable[[pytest.MonkeyPatch], None]


def breaking(owner: Any, name: str, instead: Any) -> Break:
    return lambda patch: patch.setattr(owner, name, instead)


MISTAKES: dict[str, tuple[Setting, Break]] = {
    "only a tick is kept of a call": (
        replace(PAIR, n_layers=2, head_groups=2, crashes=1),
        breaking(
            LaneMachine,
            "_complete_before",
            lambda self, end: [
                begun
                for begun in self
                if begun.is_complete and begun.index < self.complete_ticks - 1
            ],
        ),
    ),
    "the last complete inputs are not kept": (
        replace(PAIR, crashes=1),
        breaking(
            LaneMachine,
            "_complete_before",
            lambda self, end: [begun for begun in self if begun.is_complete and begun.index <= end],
        ),
    ),
    "a step that has ended is never replayed": (
        replace(PAIR, crashes=1),
        breaking(
            StepMachine,
            "may_be_asked",
            property(lambda self: not self.abandoned and not self.closed),
        ),
    ),
    "connections outlive a recovery": (
        replace(PAIR, crashes=1),
        lambda patch: patch.setattr(RankMachine, "_void", _void_without_closing),
    ),
    "progress counts ticks that have begun": (
        replace(PAIR, crashes=1),
        breaking(LaneMachine, "progress", property(lambda self: self.begun_ticks)),
    ),
    "only ticks that are not complete are replayed": (
        replace(PAIR, crashes=1),
        lambda patch: patch.setattr(LaneMachine, "unsent", _unsent_for_itself),
    ),
    "a plan is in force before what has begun is sent": (
        replace(PAIR, crashes=1),
        lambda patch: patch.setattr(StepMachine, "_replay", _replay_nothing),
    ),
    "connections begin with their own step": (
        replace(PAIR, n_steps=2, crashes=1),
        lambda patch: patch.setattr(RankMachine, "_connect", _connect_for_itself),
    ),
}


_void, _unsent, _connect = RankMachine._void, LaneMachine.unsent, RankMachine._connect


def _void_without_closing(self: Any, epoch: int, why: str, now: float) -> list[Any]:
    return [each for each in _void(self, epoch, why, now) if type(each) is not CloseConnections]


def _unsent_for_itself(self: Any, epoch: int, first_tick: int) -> list[Any]:
    return [begun for begun in _unsent(self, epoch, first_tick) if not begun.is_complete]


def _replay_nothing(self: Any, _outline: Any, _now: float) -> list[Any]:
    self.state = State.IN_FORCE
    return []


def _connect_for_itself(self: Any, step: Any) -> list[Any]:
    connects: list[Any] = _connect(self, step)
    return [replace(connect, first_step=connect.step) for connect in connects]


def explored(setting: Setting, max_states: int) -> Exploration:
    model = Model(setting)
    return explore(model.first_state(), model.moves, model.is_finished, max_states=max_states)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_recovery_holds_in_every_order_of_events(setting: Setting) -> None:
    assert explored(setting, max_states=150_000).finished_states > 0


@pytest.mark.parametrize("setting", SLOW_THREADS.values(), ids=SLOW_THREADS)
def test_recovery_holds_whatever_a_ranks_threads_are_late_with(setting: Setting) -> None:
    assert explored(setting, max_states=100_000).finished_states > 0


def test_every_rule_is_broken_once() -> None:
    assert set(BROKEN_RULES) == set(Rules.__dataclass_fields__)


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_a_broken_rule_is_noticed(rule: str) -> None:
    setting = replace(BROKEN_RULES[rule], rules=replace(Rules(), **{rule: False}))
    with pytest.raises(ModelViolation) as caught:
        explored(setting, max_states=100_000)
    assert caught.value.trace


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_ranks_mistake_is_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting, make = MISTAKES[mistake]
    make(monkeypatch)
    with pytest.raises(ModelViolation) as caught:
        explored(setting, max_states=100_000)
    assert caught.value.trace


def test_at_home_when_no_server_is_left() -> None:
    """With both servers dead for good every piece is served by its own rank."""
    setting = replace(PAIR, n_servers=1, crashes=1)
    assert explored(setting, max_states=10_000).finished_states > 0
