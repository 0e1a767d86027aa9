"""Ends connections at UCX's ports that UCX never mentions.

UCX accepts everybody who connects, waits for the first message for ever, and mentions a connection
only after it. Without this, each TCP connection that says nothing, or half a message, would keep a
file descriptor of the process for as long as its other side likes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from data_plane.half_open import HalfOpen
from data_plane.handshake import HandshakeFailure
from data_plane.process_sockets import Accepted, AcceptedSockets, count_files

logger = logging.getLogger(__name__)

_GLANCE_SECONDS: Final = 0.1
_LOOK_SECONDS: Final = 1.0
_MANY_FILES: Final = 512
"""So many more files than at the last look are reason to look at once."""
_UCX_HEADER_BYTES: Final = 13
"""UCX's magic, and the id and length of a message: no message is shorter than a header."""

HasSpoken = Callable[[Accepted], bool]


def has_sent_a_message(accepted: Accepted) -> bool:
    """Returns whether more than the beginning of UCX's first message has come."""
    return accepted.received_bytes > _UCX_HEADER_BYTES


class SilentSockets:
    """Watches ports of this process on a thread of its own, until ``close``.

    Args:
        limit: how many connections that have not spoken may be there; of more, the oldest of the
            host that has most are ended.
        timeout_seconds: how long one may take to speak.
        on_ended: called for each connection that is ended; any thread.
    """

    def __init__(
        self,
        *,
        limit: int,
        timeout_seconds: float,
        on_ended: Callable[[HandshakeFailure], None],
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._on_ended = on_ended
        self._ports: dict[int, HasSpoken] = {}
        self._sockets = AcceptedSockets()
        self._silent: HalfOpen[Accepted] = HalfOpen(limit)
        self._since: dict[Accepted, float] = {}
        # Until UCX has closed them.
        self._ended: set[Accepted] = set()
        self._ports_changed = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="silent-sockets", daemon=True)
        self._thread.start()

    def watch(self, ports: dict[int, HasSpoken]) -> None:
        """From now on watches these ports and no others.

        Args:
            ports: and whether a connection there has spoken; asked on this object's thread.
        """
        self._ports = dict(ports)
        self._ports_changed = True

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join(_LOOK_SECONDS)

    def _run(self) -> None:
        looked_at, files = 0.0, 0
        while not self._closed.wait(_GLANCE_SECONDS):
            now, files_now = time.monotonic(), count_files()
            if now - looked_at < _LOOK_SECONDS and files_now - files < _MANY_FILES:
                continue
            try:
                self._look(now)
            except Exception:
                logger.exception("looking at connections that say nothing failed")
            looked_at, files = now, count_files()

    def _look(self, now: float) -> None:
        if self._ports_changed:
            self._ports_changed = False
            self._sockets.forget()
        ports = self._ports
        silent = self._sockets.find(
            lambda accepted: accepted.port in ports and not ports[accepted.port](accepted)
        )
        self._forget_others(set(silent))
        for accepted in silent:
            if accepted not in self._silent and accepted not in self._ended:
                self._since[accepted] = now
                self._silent.enter(
                    accepted,
                    accepted.peer[0],
                    lambda ended=accepted: self._end(ended, HandshakeFailure.NO_ROOM),  # type: ignore[misc]
                )
        for accepted in self._silent:
            if now - self._since[accepted] < self._timeout_seconds:
                break
            self._silent.leave(accepted)
            self._end(accepted, HandshakeFailure.TIMEOUT)

    def _forget_others(self, silent: set[Accepted]) -> None:
        self._ended &= silent
        for accepted in self._silent:
            if accepted not in silent:
                self._silent.leave(accepted)
                del self._since[accepted]

    def _end(self, accepted: Accepted, failure: HandshakeFailure) -> None:
        del self._since[accepted]
        self._ended.add(accepted)
        accepted.shut_down()
        self._on_ended(failure)
