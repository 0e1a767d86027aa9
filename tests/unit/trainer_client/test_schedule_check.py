"""A rank runs the schedule that its session knows, but for evaluations that nobody has planned."""

from __future__ import annotations

import pytest
import torch

from core_attention.schedule_orders import one_f_one_b
from trainer_client import SessionError
from trainer_client.pipelines.schedule_check import ScheduleCheck


class Stage:
    """What of a ``PipelineStage`` is watched."""

    stage_index = 0

    def __init__(self) -> None:
        self.run: list[tuple[str, int]] = []

    def forward_one_chunk(self, chunk: int) -> None:
        self.run.append(("F", chunk))

    def backward_one_chunk(
        self, chunk: int, loss: object = None, full_backward: bool = True
    ) -> None:
        self.run.append(("B", chunk))

    def backward_weight_one_chunk(self, chunk: int) -> None:
        self.run.append(("W", chunk))


@pytest.fixture
def watched() -> tuple[Stage, ScheduleCheck]:
    stage, check = Stage(), ScheduleCheck(one_f_one_b(2, 2), 0)
    check.watch(stage)
    return stage, check


def test_the_order_of_the_schedule_is_run(watched: tuple[Stage, ScheduleCheck]) -> None:
    stage, check = watched
    check.begin_step()
    stage.forward_one_chunk(0)
    stage.forward_one_chunk(1)
    with pytest.raises(SessionError):
        stage.backward_one_chunk(1)
    check.begin_step()
    for chunk in (0, 1):
        stage.forward_one_chunk(chunk)
    with pytest.raises(SessionError):
        stage.backward_one_chunk(0, full_backward=False)
    assert stage.run == [("F", 0), ("F", 1)] * 2


def test_an_evaluation_outside_of_a_step_may_run_in_any_order(
    watched: tuple[Stage, ScheduleCheck],
) -> None:
    stage, check = watched
    with torch.no_grad():
        stage.forward_one_chunk(1)
        stage.forward_one_chunk(0)
    assert stage.run == [("F", 1), ("F", 0)]
    with pytest.raises(SessionError):
        stage.forward_one_chunk(1)
    check.begin_step()
    stage.forward_one_chunk(0)
