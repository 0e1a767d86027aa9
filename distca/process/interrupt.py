"""Ctrl-C, SIGTERM and a closed terminal: the first asks to stop in an orderly way."""

from __future__ import annotations

import logging
import os
import signal
from types import FrameType

logger = logging.getLogger(__name__)

INTERRUPTED_EXIT_CODE = 130
"""What shells report for a program that SIGINT ended."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def let_sigterm_end_process_1() -> None:
    """Makes SIGTERM end this process although it is the first of a container, for which the kernel
    ignores signals that have no handler. Commands with more to do set handlers of their own."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class StopRequest:
    """A context manager that turns signals into a flag; a second signal interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        logger.info("%s: stopping", signal.Signals(number).name)
        self.requested = True
