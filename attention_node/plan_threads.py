"""Plans that come to a node: those of a tenant wait for that tenant's alone.

To derive the routes of many documents takes up to seconds, in which the plans of others would
wait, and so would their ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class PlanThreads:
    """Takes plans in, those of an owner one after another; a thread for each that has some.

    Args:
        on_broken: called with an error that is nobody's fault but ours.
    """

    def __init__(self, on_broken: Callable[[Exception], None]) -> None:
        self._on_broken = on_broken
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}

    @property
    def idle(self) -> bool:
        """Returns whether all that was handed in has been taken in."""
        return not self._waiting

    def add(self, owner: str, take_in: Callable[[], None]) -> None:
        """Has ``take_in`` called, after what was added for ``owner`` before; returns at once."""
        with self._lock:
            waiting = self._waiting.get(owner)
            if waiting is not None:
                waiting.append(take_in)
                return
            self._waiting[owner] = deque([take_in])
        threading.Thread(target=self._run, args=(owner,), name="distca-plans", daemon=True).start()

    def _run(self, owner: str) -> None:
        while True:
            with self._lock:
                if not self._waiting[owner]:
                    del self._waiting[owner]
                    return
                take_in = self._waiting[owner].popleft()
            try:
                take_in()
            except Exception as error:
                # Ranks would wait for what never comes.
                self._on_broken(error)
