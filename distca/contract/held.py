"""Waiting for a name: of a job that runs, or of a server that is registered.

A process that was killed and is started again finds its own name taken, until the lease of the one
before has run out. The control plane then refuses it as :class:`distca.contract.rpc.Held`, which
asks for another attempt; as soon as it knows that the holder lives it says so instead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from distca.contract import rpc

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Patience:
    """One member's wait for its name.

    Args:
        who: waits, for the log.
        timeout_seconds: how long it may take.
        giving_up: when set, it waits no longer.
    """

    def __init__(self, who: str, *, timeout_seconds: float, giving_up: threading.Event) -> None:
        self._who = who
        self._timeout_seconds = timeout_seconds
        self._giving_up = giving_up
        self._began: float | None = None

    def ask(self, join: Callable[[float], Result]) -> Result:
        """The result of ``join``, which is called until it is no longer refused as held.

        Args:
            join: asks for the name, given for how many seconds it has been waited for.
        """
        while True:
            try:
                return join(self._waited_seconds)
            except rpc.Held as error:
                self._wait(error)

    @property
    def _waited_seconds(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began

    def _wait(self, error: rpc.Held) -> None:
        """Waits until it is time to ask again; raises ``error`` if that time does not come."""
        if self._began is None:
            self._began = time.monotonic()
            logger.warning(
                "%s waits for its name for up to %g s: %s",
                self._who,
                self._timeout_seconds,
                error.details,
            )
        seconds = error.retry_after_seconds
        if self._waited_seconds + seconds > self._timeout_seconds:
            raise error
        if self._giving_up.wait(seconds):
            raise error
