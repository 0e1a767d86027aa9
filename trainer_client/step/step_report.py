"""A rank's measurements in one step, in numbers and on a time line.

A GPU computes behind the thread that launches its work: the thread is blocked on replies while the
device computes what was launched before. There two events in the stream show how long a tick held
up the rank: one when the thread begins to wait, one when the replies have been taken in. Nothing is
launched in between but what takes them in, so between the two the device had nothing else to do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from core_attention.ca_task import Phase
from trainer_client.metrics import TickWait

_LOOK_SECONDS: Final = 1e-4


@dataclass(frozen=True)
class TraceEvent:
    """Something that took time in a step.

    Attributes:
        lane: where: ``"nano-batch 0"``, ``"in-place server"``, ...
        name: what: ``"compute"``, ``"wait"``, ``"send"``, ``"kernel"``.
        begin_seconds, end_seconds: since the step began.
        detail: layer and phase, in words.
    """

    lane: str
    name: str
    begin_seconds: float
    end_seconds: float
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The measurements of a rank in one step.

    Attributes:
        step: which.
        tokens: of this rank.
        step_seconds: wall seconds from the plan's arrival to the end of the step.
        plan_wait_seconds: wall seconds that the step waited for its plan.
        wait_seconds: of ``step_seconds``, in which the rank's thread was blocked on results of core
            attention.
        exposed_seconds: of ``step_seconds``, in which nothing was computed because of that. The
            same on a CPU. A GPU computes what was launched before while the thread is blocked, so
            there events in its stream show it; None if it did not come to them in time.
        send_seconds: of ``step_seconds``, spent packing and handing over requests.
        sent_bytes, received_bytes: to and from other processes.
        recoveries: how often another plan was put in force in the middle of the step.
        replayed_ticks: sent again under another plan.
        recovery_seconds: wall seconds without a plan in force, all recoveries together.
        trace: what took time in it.
    """

    step: int
    tokens: int
    step_seconds: float
    plan_wait_seconds: float
    wait_seconds: float
    exposed_seconds: float | None
    send_seconds: float
    sent_bytes: int
    received_bytes: int
    recoveries: int = 0
    replayed_ticks: int = 0
    recovery_seconds: float = 0.0
    trace: Sequence[TraceEvent] = ()


@dataclass(frozen=True, eq=False)
class DeviceWait:
    """A wait of which the device's clock knows the length, once the device has come so far.

    Attributes:
        phase, flight_seconds: as of a :class:`TickWait`.
        began: what was launched before the wait has run.
        ended: the replies have been taken in.
    """

    phase: Phase
    flight_seconds: float
    began: torch.cuda.Event
    ended: torch.cuda.Event

    def known(self) -> TickWait:
        """Its length; only once ``ended`` has happened."""
        seconds = self.began.elapsed_time(self.ended) / 1e3
        return TickWait(self.phase, self.flight_seconds, seconds)


def lengths(waits: Sequence[DeviceWait], timeout_seconds: float) -> list[TickWait] | None:
    """The lengths of a step's waits, in order; None if the device does not come to the last of them
    within ``timeout_seconds``.

    The device has little more to do than the thread has: it was waited for in the last of them.
    """
    deadline = time.monotonic() + timeout_seconds
    for wait in waits:
        while not wait.ended.query():
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_SECONDS)
    return [wait.known() for wait in waits]
