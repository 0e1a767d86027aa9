"""Signs of life of a peer: the question, the answer, and what silence means.

The question and the answer are small messages of the control channel. The answer is given on the
peer's owner thread, which never runs a kernel and never waits for another rank: silence means that
the process is stopped or that the network between the two is cut, in either direction.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Final, Protocol

from data_plane.owner_thread import OwnerThread, Timer

# Tags of the control channel, beside those of the close notice and of the probe.
PING_TAG: Final = 32
PONG_TAG: Final = 33

MEASURED_BYTES: Final = 256 * 2**10
"""Smaller messages show how long an exchange takes, not what the network carries."""

RECENT_MESSAGES: Final = 16

SHARE_OF_MEASURED_RATE: Final = 0.25
"""Messages of other peers may have come to the same network since its rate was measured."""

SUSPENDED_SECONDS = 1.0
"""A deadline that is looked at so much too late: this process itself was stopped meanwhile, and
answers may wait unread."""


class Pinged(Protocol):
    """The connection as its pings need it."""

    @property
    def worker(self) -> OwnerThread: ...

    @property
    def closed(self) -> bool: ...

    @property
    def greeted(self) -> bool: ...

    @property
    def moving_bytes(self) -> int: ...

    def send_control(self, operation: int, payload: bytes) -> None: ...

    def lose_silent_peer(self, seconds: float) -> None: ...


class Pings:
    """The pings of one connection. ``ask`` is for any thread, the rest for the owner thread.

    An answer shares the network with the messages under way, so it is given the time that they may
    take: at :data:`SHARE_OF_MEASURED_RATE` of the slowest of the last messages, or at
    ``slowest_bytes_per_second`` while none was received or if that is faster. By the second alone
    the hundreds of MiB that NVLink moves in milliseconds would hide a stopped peer for many
    seconds.

    Args:
        connection: whose they are.
        slowest_bytes_per_second: the slowest network worth using.

    Attributes:
        last_heard: ``time.monotonic()`` when something of the peer last arrived.
    """

    def __init__(self, connection: Pinged, slowest_bytes_per_second: float) -> None:
        self._connection = connection
        self._slowest_bytes_per_second = slowest_bytes_per_second
        self._rates: deque[float] = deque(maxlen=RECENT_MESSAGES)
        self._verdict: Timer | None = None
        self.last_heard = time.monotonic()

    def ask(self, timeout_seconds: float) -> None:
        """See ``Connection.ping``."""
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds is {timeout_seconds}; give more than 0")
        self._connection.worker.submit(lambda: self._ask(timeout_seconds))

    def received(self, nbytes: int, seconds: float) -> None:
        """A message of ``nbytes`` arrived within ``seconds`` from its first byte."""
        if nbytes >= MEASURED_BYTES and seconds > 0:
            self._rates.append(nbytes / seconds)

    def take(self, tag: int) -> None:
        """A ping or an answer arrived."""
        if tag == PING_TAG:
            self._connection.send_control(PONG_TAG, b"pong")
        elif self._verdict is not None:
            self._verdict.cancel()
            self._verdict = None

    def _ask(self, timeout_seconds: float) -> None:
        connection = self._connection
        if self._verdict is not None or connection.closed or not connection.greeted:
            return
        self._expect_answer(timeout_seconds)
        connection.send_control(PING_TAG, b"ping")

    def _expect_answer(self, timeout_seconds: float) -> None:
        asked = time.monotonic()
        allowed = timeout_seconds
        allowed += self._connection.moving_bytes / self._counted_rate()
        self._verdict = self._connection.worker.call_at(
            asked + allowed, lambda: self._judge(asked, allowed, timeout_seconds)
        )

    def _counted_rate(self) -> float:
        measured = SHARE_OF_MEASURED_RATE * min(self._rates, default=0.0)
        return max(measured, self._slowest_bytes_per_second)

    def _judge(self, asked: float, allowed: float, timeout_seconds: float) -> None:
        self._verdict = None
        if self._connection.closed or self.last_heard > asked:
            return
        if time.monotonic() - asked - allowed > SUSPENDED_SECONDS:
            self._ask(timeout_seconds)
            return
        self._connection.lose_silent_peer(time.monotonic() - self.last_heard)
