"""Device seconds of parts of a step, by name, without waiting for the device in between."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Times what is launched on the current stream.

    Args:
        device: on a CPU, wall time is taken.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Times a block."""
        if not self._on_gpu:
            began = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - began
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._events.append((name, begin, end))

    def read(self) -> dict[str, float]:
        """Seconds by name since the last call; the device must have finished."""
        for name, begin, end in self._events:
            self._seconds[name] += begin.elapsed_time(end) / 1e3
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        self._events.clear()
        return seconds
