"""One rank's part of a tick while it is on a server: how long it was there, and what the rank in
the server's own process waits for."""

from __future__ import annotations

import threading
import time

import torch

from attention_node.open_tick import OpenTick, TickGivenUp
from attention_node.served_job import ExchangeTimes
from core_attention.tick import Tick


class ExchangeTimer:
    """A rank's rows on the server, from their arrival to the reply."""

    def __init__(self, open_tick: OpenTick, job_id: str, rank: int) -> None:
        self._open_tick = open_tick
        self._job_id, self._rank = job_id, rank
        self._kernel_before = open_tick.kernel_seconds
        self._began_at = time.monotonic()

    def times(self) -> ExchangeTimes:
        """The times until now."""
        seconds = time.monotonic() - self._began_at
        # A call that ran already when the rows arrived is counted from their arrival on.
        kernel_seconds = min(self._open_tick.kernel_seconds - self._kernel_before, seconds)
        return ExchangeTimes(
            tick=self._open_tick.tick,
            rank=self._rank,
            job_id=self._job_id,
            began_at=self._began_at,
            wait_seconds=seconds - kernel_seconds,
            kernel_seconds=kernel_seconds,
        )


class LocalReply:
    """The end of the local rank's side of a tick.

    Attributes:
        tick: which exchange.
        written: once done, on a GPU: the event after which the outputs are complete.
        ended_at: ``time.monotonic()`` when it was done; None before, and if it failed.
    """

    def __init__(self, tick: Tick) -> None:
        self.tick = tick
        self.written: torch.cuda.Event | None = None
        self.ended_at: float | None = None
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def set_done(self, written: torch.cuda.Event | None) -> None:
        self.written = written
        self.ended_at = time.monotonic()
        self._ended.set()

    def set_failed(self, error: BaseException) -> None:
        self._error = error
        self._ended.set()

    def wait(self, timeout_seconds: float) -> bool:
        """Waits for the outputs; False if ``timeout_seconds`` passed before.

        Raises:
            TickGivenUp: they will not come.
        """
        if not self._ended.wait(timeout_seconds):
            return False
        if self._error is not None:
            raise TickGivenUp(f"{self.tick} failed in-place: {self._error}") from self._error
        return True
