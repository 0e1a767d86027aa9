"""Ctrl-C, SIGTERM and a closed terminal: the first asks to stop in an orderly way."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from distca.process.logs import logs_are_json

logger = logging.getLogger(__name__)

INTERRUPTED_EXIT_CODE = 130
"""The exit code by which shells report a program that SIGINT ended."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded(*numbers: signal.Signals) -> list[signal.Signals]:
    """Those of ``numbers`` that this process was not started to ignore, as SIGHUP under nohup and
    SIGINT in the background of a script: by convention those stay ignored."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def let_sigterm_end_process_1() -> None:
    """Makes SIGTERM end this process although it is the first of a container, for which the kernel
    ignores signals that have no handler. Commands with more to do set handlers of their own."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _exit)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Meanwhile SIGINT, unless it is ignored, ends this process at once, whatever its main thread
    is at: for commands that leave nothing half done. A compiler that runs for seconds looks for no
    signals, and loses exceptions that come out of them in its callbacks."""
    if not heeded(signal.SIGINT):
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)

    def wait() -> None:
        while number := os.read(read, 1):
            if number[0] == signal.SIGINT:
                say_interrupted()
                os._exit(INTERRUPTED_EXIT_CODE)
        os.close(read)

    threading.Thread(target=wait, name="distca-interrupt", daemon=True).start()
    former_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    former = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        signal.set_wakeup_fd(former_fd)
        os.close(write)


def say_interrupted() -> None:
    """The last line of a command that Ctrl-C has ended."""
    if logs_are_json():
        logger.error("interrupted")
    else:
        sys.stderr.write("Interrupted.\n")


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class StopRequest:
    """A context manager that turns signals into a flag; a second signal interrupts at once.

    Attributes:
        requested: one has come.
        interrupted: it was Ctrl-C.
    """

    def __init__(self) -> None:
        self.requested = self.interrupted = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in heeded(*_SIGNALS):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        logger.info("%s: stopping", signal.Signals(number).name)
        self.requested, self.interrupted = True, number == signal.SIGINT

    def check(self) -> None:
        """Raises KeyboardInterrupt if it was Ctrl-C that asked, once all has been stopped: a shell
        must not take that for the end of what was asked for."""
        if self.interrupted:
            raise KeyboardInterrupt
