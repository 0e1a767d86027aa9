"""How long a step's ticks held up a device, from its events."""

from __future__ import annotations

import time
from typing import Any, cast

import torch

from core_attention.ca_task import Phase
from trainer_client.metrics import TickWait
from trainer_client.step.step_report import DeviceWait, lengths


class Moment:
    """An event of a device whose clock is ours; times in milliseconds, as CUDA's are."""

    def __init__(self, milliseconds: float, happens_after: float = 0.0) -> None:
        self.milliseconds = milliseconds
        self.happens_at = time.monotonic() + happens_after

    def query(self) -> bool:
        return time.monotonic() >= self.happens_at

    def elapsed_time(self, end: Moment) -> float:
        assert end.query(), "CUDA refuses to tell the time of an event that has not happened"
        return end.milliseconds - self.milliseconds


def wait(phase: Phase, began: Moment, ended: Moment) -> DeviceWait:
    event: Any = cast(torch.cuda.Event, began)
    return DeviceWait(phase, flight_seconds=0.5, began=event, ended=cast(Any, ended))


def test_the_length_of_a_wait_is_what_the_device_had_nothing_else_to_do() -> None:
    waits = [
        wait(Phase.FORWARD, Moment(1000.0), Moment(1250.0)),
        wait(Phase.BACKWARD, Moment(2000.0), Moment(2000.0)),
    ]
    assert lengths(waits, 1.0) == [
        TickWait(Phase.FORWARD, flight_seconds=0.5, exposed_seconds=0.25),
        TickWait(Phase.BACKWARD, flight_seconds=0.5, exposed_seconds=0.0),
    ]


def test_a_device_that_is_behind_its_thread_is_waited_for() -> None:
    behind = wait(Phase.BACKWARD, Moment(0.0), Moment(125.0, happens_after=0.1))
    assert lengths([behind], 30.0) == [TickWait(Phase.BACKWARD, 0.5, 0.125)]


def test_a_device_that_does_not_come_so_far_is_not_waited_for_longer() -> None:
    never = wait(Phase.BACKWARD, Moment(0.0), Moment(1.0, happens_after=3600.0))
    assert lengths([never], 0.05) is None
