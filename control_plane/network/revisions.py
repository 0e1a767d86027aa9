"""Revisions of something that clients keep a copy of, on the event loop."""

from __future__ import annotations

import asyncio
import secrets

from control_plane.errors import ShuttingDownError


class Revisions:
    """Counts changes, and lets calls wait for the next one.

    Attributes:
        current: names the revision that there is now; no other process has the same.
    """

    def __init__(self) -> None:
        self._process = secrets.token_hex(4)
        self._number = 0
        self._next = asyncio.Event()
        self._ended = False
        self.current = f"{self._process}-0"

    def advance(self) -> None:
        """There is another one now."""
        self._number += 1
        self.current = f"{self._process}-{self._number}"
        self._wake()

    def end(self) -> None:
        """There will be no other; whoever waits is refused."""
        self._ended = True
        self._wake()

    async def later_than(self, known: str, *, seconds: float) -> None:
        """Waits until the current one is another than ``known``, but no longer than that.

        Raises:
            ShuttingDownError: there will be no other.
        """
        if self.current == known and not self._ended:
            try:
                await asyncio.wait_for(self._next.wait(), seconds)
            except TimeoutError:
                return
        if self._ended:
            raise ShuttingDownError("the control plane is stopping")

    def _wake(self) -> None:
        self._next.set()
        self._next = asyncio.Event()
