"""What an owner thread answers to a thread that waits for it."""

from __future__ import annotations

import threading
from typing import Any


class OwnerResult:
    """One answer; the first one counts, and none once the waiting thread has given up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._taken = False
        self._value: Any = None

    def set(self, value: Any) -> bool:
        """Answers with ``value``, which may be an exception; returns whether it counts."""
        with self._lock:
            if self._taken:
                return False
            self._taken = True
        self._value = value
        self._ready.set()
        return True

    def get(self, timeout_seconds: float) -> Any:
        """Returns the value, or raises it if it is an exception.

        Raises:
            TimeoutError: no answer came; a later one does not count.
        """
        if not self._ready.wait(max(timeout_seconds, 0.0)):
            with self._lock:
                given_up = not self._taken
                self._taken = True
            if given_up:
                raise TimeoutError(f"no answer from the owner thread in {timeout_seconds:.3g} s")
            self._ready.wait(1.0)
        if isinstance(self._value, Exception):
            raise self._value
        return self._value
