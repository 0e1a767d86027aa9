"""Finds peers that are stopped or cut off while something is awaited from them.

No transport notices such a peer by itself, and a deadline on the answer alone takes it for
one that is busy, or that waits for a third process. So after a quiet while the peer's transport is
asked for a sign of life (``Connection.ping``); without one the connection fails, and with it
everything that is awaited on it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass

from data_plane.transport import Connection, Transfer

logger = logging.getLogger(__name__)

_LOOKS_PER_QUIET_TIME = 8


@dataclass(eq=False)
class _Watched:
    """A connection on which something is awaited.

    Attributes:
        waits: how many things are.
        since: ``time.monotonic()`` when the first of them began, or the last ping.
        ping_timeout_seconds: how long the peer may take to answer.
    """

    connection: Connection
    waits: int
    since: float
    ping_timeout_seconds: float


class LivenessMonitor:
    """Pings the connections on which something has been awaited for longer than ``quiet_seconds``.

    A peer that is stopped or cut off fails its connection within ``quiet_seconds`` plus
    ``ping_timeout_seconds`` from the start of the wait, or from its last message; with
    a large message under way, within the time more that the slowest network worth using takes for
    it (see ``Connection.ping``). One thread; it looks at nothing but the watched connections.

    Args:
        quiet_seconds: how long a peer may be silent before it is asked.
        ping_timeout_seconds: how long it may take to answer.
    """

    def __init__(self, *, quiet_seconds: float, ping_timeout_seconds: float) -> None:
        for name, value in (
            ("quiet_seconds", quiet_seconds),
            ("ping_timeout_seconds", ping_timeout_seconds),
        ):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it must be a positive number")
        self._quiet_seconds = quiet_seconds
        self._ping_timeout_seconds = ping_timeout_seconds
        self._look_seconds = quiet_seconds / _LOOKS_PER_QUIET_TIME
        self._lock = threading.Lock()
        self._watched: dict[int, _Watched] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distca-liveness", daemon=True)
        self._thread.start()

    def watch(self, connection: Connection, ping_timeout_seconds: float | None = None) -> None:
        """Something is awaited on ``connection`` from now on; once for each thing.

        Args:
            connection: what the peer owes it on.
            ping_timeout_seconds: how long the peer may take to answer; None: as long as any.
        """
        with self._lock:
            watched = self._watched.get(id(connection))
            if watched is None:
                # The entry keeps the connection alive, so that its id stays its own.
                allowed = ping_timeout_seconds or self._ping_timeout_seconds
                self._watched[id(connection)] = _Watched(connection, 1, time.monotonic(), allowed)
            else:
                watched.waits += 1

    def watch_until_end(
        self,
        connection: Connection,
        transfer: Transfer,
        ping_timeout_seconds: float | None = None,
    ) -> None:
        """The peer owes the end of ``transfer``, which is one of ``connection``'s, from now on; see
        :meth:`watch`."""
        self.watch(connection, ping_timeout_seconds)
        transfer.add_done_callback(lambda _: self.unwatch(connection))

    def unwatch(self, connection: Connection) -> None:
        """One of the things came, or is not awaited any more."""
        with self._lock:
            watched = self._watched[id(connection)]
            watched.waits -= 1
            if watched.waits == 0:
                del self._watched[id(connection)]

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._closed.wait(self._look_seconds):
            for watched in self._take_quiet(time.monotonic()):
                watched.connection.ping(watched.ping_timeout_seconds)

    def _take_quiet(self, now: float) -> list[_Watched]:
        """Whom to ping now: those that will have been quiet for too long before the next look."""
        quiet = []
        with self._lock:
            for watched in self._watched.values():
                heard = max(watched.since, watched.connection.last_heard)
                if now - heard > self._quiet_seconds - self._look_seconds:
                    watched.since = now
                    quiet.append(watched)
        return quiet
