"""The protocol of docs/fault_tolerance.md, in every order in which its events can happen.

What is proved, within the bounds of each setting: no tick is completed with results of two epochs,
nor with a piece's result missing or counted twice; rows that have to be sent again are still there;
a fault leads to one recovery at most; nothing ever gets stuck. That the model can see mistakes is
proved by breaking the rules one at a time.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.model.explorer import Exploration, ModelViolation, explore
from tests.model.protocol import Model
from tests.model.setting import Document, Rules, Setting

FULL = bool(os.environ.get("DISTCA_CHAOS_FULL"))
"""Whether larger bounds are explored too, which takes minutes."""

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
    "a server dies, another is cut off": replace(PAIR, crashes=1, cuts=1),
    "two layers": replace(PAIR, n_layers=2, crashes=1),
    "two layers in two lanes": replace(LANES, n_layers=2, crashes=1),
    "heads and tails": replace(CROSSED, n_layers=2, crashes=1),
    "three ranks of one document": replace(TRIPLE, crashes=1),
    "the control plane dies": replace(PAIR, restarts=1),
    "two steps": replace(PAIR, n_steps=2, crashes=1),
}

LARGE_SETTINGS = {
    "the control plane dies, two lanes": replace(LANES, restarts=1),
    "the control plane dies in a chain": replace(CHAIN, restarts=1),
    "two steps, and the control plane dies": replace(PAIR, n_steps=2, restarts=1),
    "two servers die in a chain": replace(CHAIN, crashes=2),
    "two cuts": replace(PAIR, cuts=2),
    "two servers die in two lanes": replace(LANES, crashes=2),
    "a cut in two lanes": replace(CROSSED, n_layers=2, cuts=1),
    "a server and the control plane die": replace(PAIR, crashes=1, restarts=1),
    "the control plane dies twice": replace(PAIR, restarts=2),
    "two steps, two servers die": replace(PAIR, n_steps=2, crashes=2),
    "three servers, two die": replace(PAIR, n_servers=3, crashes=2),
}

BROKEN_RULES = {
    "keep_last_inputs": replace(PAIR, crashes=1),
    "keep_until_finished": replace(PAIR, crashes=1),
    "first_tick_is_least": replace(PAIR, crashes=1),
    "wait_for_all_answers": replace(PAIR, crashes=1),
    "close_before_answer": replace(PAIR, crashes=1),
    "servers_refuse_old": replace(PAIR, crashes=1),
    "epochs_survive": replace(PAIR, restarts=1),
    "lanes_are_independent": replace(LANES, crashes=1),
    "old_reports_change_nothing": replace(PAIR, crashes=1),
}


def explored(setting: Setting, max_states: int) -> Exploration:
    model = Model(setting)
    result = explore(model.first_state(), model.moves, model.is_finished, max_states=max_states)
    print(
        f"{result.states} states, {result.moves} moves, up to {result.depth} in a row, "
        f"{result.seconds:.1f} s"
    )
    return result


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_recovery_holds_in_every_order_of_events(setting: Setting) -> None:
    assert explored(setting, max_states=100_000).finished_states > 0


@pytest.mark.skipif(not FULL, reason="takes minutes; make chaos runs it")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("setting", LARGE_SETTINGS.values(), ids=LARGE_SETTINGS)
def test_recovery_holds_in_larger_settings(setting: Setting) -> None:
    assert explored(setting, max_states=3_000_000).finished_states > 0


def test_every_rule_is_broken_once() -> None:
    assert set(BROKEN_RULES) == set(Rules.__dataclass_fields__)


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_a_broken_rule_is_noticed(rule: str) -> None:
    setting = replace(BROKEN_RULES[rule], rules=replace(Rules(), **{rule: False}))
    with pytest.raises(ModelViolation) as caught:
        explored(setting, max_states=100_000)
    assert caught.value.trace


def test_at_home_when_no_server_is_left() -> None:
    """With both servers dead for good every piece is served by its own rank."""
    setting = replace(PAIR, n_servers=1, crashes=1)
    assert explored(setting, max_states=10_000).finished_states > 0
