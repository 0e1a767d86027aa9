"""How long a tick held up what a rank computes on.

On a CPU the rank's thread computes, and is held up while it is blocked. A GPU computes behind the
thread that launches its work: the thread is blocked on replies while the device computes what was
launched before. There two events in the stream tell: one when the thread begins to wait, one when
the replies have been taken in. Nothing is launched in between but what takes them in, so between
the two the device had nothing else to do.
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
