"""A check that a rank runs the schedule that its session knows.

Servers expect the ticks of a rank in the order of its schedule, and post receives for the next
actions only. A rank that runs another order would wait for a receive that comes too late, so the
first action that is out of order is an error, here and at once. An evaluation that nobody has
planned sends nothing, and may run in any order outside of a step.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

from core_attention.schedule import Action, Kind, Schedule
from trainer_client.errors import SessionError
from trainer_client.step.lane import is_unplanned_evaluation


class ScheduleCheck:
    """The actions that a rank is still to run in a step.

    Args:
        schedule: what the session knows.
        pipeline_rank: this rank's place in its pipeline.
    """

    def __init__(self, schedule: Schedule, pipeline_rank: int) -> None:
        self._name = schedule.name
        self._order = schedule.order(pipeline_rank)
        self._left: deque[Action] = deque()

    def begin_step(self) -> None:
        """All actions are to come."""
        self._left = deque(self._order)

    def watch(self, stage: Any) -> None:
        """Has a stage's methods checked before they run: they are replaced on the object."""
        index = stage.stage_index
        stage.forward_one_chunk = self._checked(stage.forward_one_chunk, index, _forward)
        stage.backward_one_chunk = self._checked(stage.backward_one_chunk, index, _backward)
        stage.backward_weight_one_chunk = self._checked(
            stage.backward_weight_one_chunk, index, _weight
        )

    def runs(self, action: Action) -> None:
        """An action begins."""

        expected = self._left.popleft() if self._left else None
        if action != expected:
            raise SessionError(
                f"the loop runs {action} where schedule {self._name} has "
                f"{expected or 'nothing more'}; give SessionOptions.pipelining the schedule that "
                "is run, in one step's block"
            )

    def _checked(
        self, method: Callable[..., Any], stage: int, kind_of: Callable[..., Kind]
    ) -> Callable[..., Any]:
        @functools.wraps(method)
        def checked(chunk: int, *args: Any, **kwargs: Any) -> Any:
            if not is_unplanned_evaluation():
                self.runs(Action(stage, kind_of(*args, **kwargs), chunk))
            return method(chunk, *args, **kwargs)

        return checked


def _forward(*args: Any, **kwargs: Any) -> Kind:
    return Kind.FORWARD


def _backward(loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> Kind:
    """The kind by the arguments of PyTorch's ``backward_one_chunk``."""
    return Kind.BACKWARD if full_backward else Kind.BACKWARD_INPUT


def _weight(*args: Any, **kwargs: Any) -> Kind:
    return Kind.BACKWARD_WEIGHT
