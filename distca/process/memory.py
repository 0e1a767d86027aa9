"""Memory that a process has freed, and its allocator still holds."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

INTERVAL_SECONDS = 10.0
"""Between two times; each takes about a millisecond, of a thread that holds no lock of Python."""


def keep_returning_memory() -> None:
    """Gives it back to the system from time to time. Otherwise a process stays as large as its
    largest moment: glibc keeps what is freed below memory in use, in a heap for each thread. Does
    nothing where another allocator runs."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        threading.Thread(target=_keep_trimming, args=(trim,), name="memory", daemon=True).start()


def _keep_trimming(trim: Callable[[int], int]) -> None:
    while True:
        time.sleep(INTERVAL_SECONDS)
        trim(0)
