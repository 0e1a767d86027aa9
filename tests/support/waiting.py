"""How tests wait for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_SECONDS = 10.0
"""Far above what anything waited for takes, so that a hang fails instead of blocking the suite."""

_POLL_SECONDS = 0.002


def eventually(holds: Callable[[], object], seconds: float = DEADLINE_SECONDS) -> None:
    """Waits until ``holds`` does, and fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"it did not come true within {seconds:g} s"
        time.sleep(_POLL_SECONDS)
