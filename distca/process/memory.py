"""Memory that a process has freed, and its allocator still holds."""

from __future__ import annotations

import contextlib
import ctypes


def return_freed_memory() -> None:
    """Gives it back to the system. Otherwise a process stays as large as its largest moment: glibc
    keeps what is freed below memory in use, in a heap for each thread. Nothing happens where
    another allocator runs."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
