"""TLS connections that came to nothing.

gRPC reports no failed handshakes to a server in Python. It does ask for the certificates at
the beginning of each, and every call shows its connection's address; a connection of which no call
has come after some seconds had no certificate, one of another authority or an expired one, or its
client had nothing to say.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

FORGET_SECONDS = 600.0
"""A connection without calls for so long is forgotten: its port may be another client's by now."""


class Connections:
    """Matches connections begun with connections that brought a call.

    Args:
        clock: seconds that never go back.
        patience_seconds: how long a connection may take to bring its first call.
    """

    def __init__(self, clock: Callable[[], float], *, patience_seconds: float) -> None:
        self._clock = clock
        self._patience_seconds = patience_seconds
        # Appended to by gRPC's threads, which is safe; taken from by the event loop alone.
        self._begun: deque[float] = deque()
        self._seen: OrderedDict[str, float] = OrderedDict()

    def begun(self) -> None:
        """A handshake begins; called on gRPC's threads."""
        self._begun.append(self._clock())

    def called(self, peer: str) -> bool:
        """A call came from ``peer``, ``ipv4:host:port``; returns whether it is the first."""
        first = self._seen.pop(peer, None) is None
        if first and self._begun:
            # Perhaps another one's beginning; as counts go it makes no difference.
            self._begun.popleft()
        self._seen[peer] = self._clock()
        return first

    def take_failed(self) -> int:
        """How many connections have come to nothing since the last time."""
        now, failed = self._clock(), 0
        while self._begun and now - self._begun[0] > self._patience_seconds:
            self._begun.popleft()
            failed += 1
        while self._seen and now - next(iter(self._seen.values())) > FORGET_SECONDS:
            self._seen.popitem(last=False)
        return failed
