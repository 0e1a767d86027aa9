"""One server's machine, in every order of plans, rows, losses, recoveries, late results, closes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from attention_node.machine import server as machine
from attention_node.machine.outline import StepOutline
from attention_node.machine.server import ServerMachine
from attention_node.machine.step import ServedTicks
from attention_node.machine.tick import TickMachine
from core_attention.tick_order import TickOrder, Turn
from tests.service.model.explorer import Exploration, ModelViolation, explore
from tests.service.model.serving import Serving, ServingModel, piped

RECOVERY = Serving(forward_only=True, recoveries=1)
UNHEARD = Serving(forward_only=True, recoveries=1, unheard=True)
FROZEN = Serving(frozen=True)
APART = Serving(apart=True)
SETTINGS = {
    "two lanes": Serving(n_lanes=2),
    "a recovery in two lanes": Serving(n_ranks=1, n_lanes=2, forward_only=True, recoveries=1),
    "two recoveries": Serving(n_ranks=1, forward_only=True, recoveries=2),
    "a recovery that is not heard of": replace(UNHEARD, n_ranks=1),
    "a reset": Serving(n_ranks=1, resets=1),
    "a recovery and a close": Serving(forward_only=True, recoveries=1, closes=True),
    "two lanes and a close": Serving(n_lanes=2, forward_only=True, closes=True),
    "a rank in the server's process": Serving(local_rank=0, recoveries=1),
    "frozen layers": FROZEN,
    "ranks that go home": APART,
    "ranks that go home, one in the server's process": Serving(apart=True, local_rank=0),
    "a rank that goes home, and a recovery": Serving(n_ranks=1, apart=True, recoveries=1),
    "a pipeline": piped("1f1b", 2, 3),
    "a pipeline with little memory": piped("1f1b", 2, 3, limit_bytes=2),
    "backwards in two parts": piped("zero-bubble", 2, 3),
    "backwards in two parts, attention with the second": piped(
        "zero-bubble", 2, 3, attention_is_late=True
    ),
    "replicas of a stage, one gives only keys": piped(
        "gpipe", 1, 3, replicas=2, keys_only=True, limit_bytes=2
    ),
    "little memory": Serving(n_layers=3, keys_only=True, forward_only=True, limit_bytes=2),
}

Break = Callable[[pytest.MonkeyPatch], None]


def breaking(owner: Any, name: str, instead: Callable[..., Any]) -> Break:
    return lambda patch: patch.setattr(owner, name, instead)


MISTAKES: dict[str, tuple[Serving, Break]] = {
    "a recovery drops nothing": (RECOVERY, breaking(ServerMachine, "_recover", lambda *_: [])),
    "a plan is no sign of a recovery": (
        UNHEARD,
        lambda patch: patch.setattr(ServerMachine, "step_planned", _planned_without_recovery),
    ),
    "open ticks are forgotten": (RECOVERY, breaking(machine, "_give_up", lambda *_: [])),
    "a part runs before its rows are here": (
        RECOVERY,
        breaking(TickMachine, "last_replies", lambda tick: sorted(tick.unreplied & tick.arrived)),
    ),
    "receives are posted in another order than the schedule's": (
        piped("1f1b", 2, 3),
        breaking(TickOrder, "turn", lambda _, rank, tick: Turn(-tick.nano_batch, -tick.nano_batch)),
    ),
    "memory of pipelines is counted by whole ticks": (
        piped("1f1b", 2, 2, limit_bytes=2),
        breaking(ServerMachine, "_memory_over", lambda *_: []),
    ),
    "a lane that has ended is waited for": (
        FROZEN,
        breaking(ServedTicks, "end_lane", lambda *_: ([], [], [])),
    ),
    "a tick goes on as if all of its ranks did": (
        APART,
        breaking(TickMachine, "leave", lambda *_: None),
    ),
}


def _planned_without_recovery(
    self: ServerMachine[Any, Any], job_id: str, step: Any, outline: StepOutline
) -> list[Any]:
    job = self._jobs[job_id]
    job.epoch, epoch = outline.epoch, job.epoch
    try:
        return _step_planned(self, job_id, step, outline)
    finally:
        job.epoch = epoch


_step_planned = ServerMachine.step_planned


def explored(setting: Serving, max_states: int) -> Exploration:
    model = ServingModel(setting)
    return explore(model.first_state(), model.moves, model.is_finished, max_states=max_states)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_server_serves_in_every_order_of_events(setting: Serving) -> None:
    assert explored(setting, max_states=20_000).finished_states > 0


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting, make = MISTAKES[mistake]
    make(monkeypatch)
    with pytest.raises(ModelViolation) as caught:
        explored(setting, max_states=20_000)
    assert caught.value.trace
