"""Order between CUDA streams and threads that know nothing of streams."""

from __future__ import annotations

from collections.abc import Callable

import torch


def record_event(device: torch.device, *, timed: bool = False) -> torch.cuda.Event | None:
    """An event after everything launched so far on the current stream; None on a CPU.

    Args:
        timed: the event knows when that was, to the device's clock.
    """
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=timed)
    event.record(torch.cuda.current_stream(device))
    return event


def launched_work(device: torch.device) -> Callable[[], bool] | None:
    """Returns a query of whether everything launched so far on the current stream has run; None on
    a CPU, where it has."""
    event = record_event(device)
    return None if event is None else event.query
