"""Order between CUDA streams and threads that know nothing of streams."""

from __future__ import annotations

import torch


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """An event after everything launched so far on the current stream; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
