"""When ticks were complete, written by the trainer processes as they train, read by the tests.

Times are those of ``time.monotonic()``, one clock for all processes of a machine. A record is
written whole or not at all, so the log can be read while it grows.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_RECORD = struct.Struct("<dqii")
COMPLETE, BACKWARD = 1, 2


@dataclass(frozen=True)
class TickEvent:
    """A tick was begun, or completed.

    Attributes:
        at: ``time.monotonic()``.
        step, layer: which tick.
        backward: its phase.
        complete: whether it was completed then.
    """

    at: float
    step: int
    layer: int
    backward: bool
    complete: bool


class TickLog:
    """Writes events, after those of a process that was here before."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, event: TickEvent) -> None:
        flags = COMPLETE * event.complete + BACKWARD * event.backward
        os.write(self._file, _RECORD.pack(event.at, event.step, event.layer, flags))


class TickReader:
    """Reads what one process has written so far, and then what is new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.events: list[TickEvent] = []

    def read(self) -> list[TickEvent]:
        """The events that are new."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as log:
            log.seek(len(self.events) * _RECORD.size)
            raw = log.read()
        whole = len(raw) - len(raw) % _RECORD.size
        new = [
            TickEvent(at, step, layer, bool(flags & BACKWARD), bool(flags & COMPLETE))
            for at, step, layer, flags in _RECORD.iter_unpack(raw[:whole])
        ]
        self.events += new
        return new


def longest_wait(events: Sequence[TickEvent], begin: float, end: float) -> float:
    """The longest time within ``[begin, end)`` in which no tick was completed, in seconds."""
    longest, last = 0.0, begin
    for event in events:
        if not event.complete or event.at < begin:
            continue
        longest = max(longest, min(event.at, end) - last)
        last = event.at
        if last >= end:
            break
    return longest
