"""The messages that a UCX worker expects, by their tags on the wire, and those that none expects.

A tag is good for one message. A second one under it is somebody else's, or the first was: its
recipient receives it too, and ends its connection.

A message may come before its offer, and then nothing shows whose it is, or whether a stranger sent
it. It waits in a place that has an end, in number, bytes and time; beyond, the oldest are dropped
and counted. When an offer comes for a message that was dropped, the connection of that offer fails,
and no other: so a flood may end connections of peers whose messages wait while it goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from data_plane.metrics import DropCause

if TYPE_CHECKING:
    from data_plane.posted_transfer import PostedTransfer


class Recipient(Protocol):
    """The object that expects a message."""

    def take(self, transfer: PostedTransfer | None, message: Any) -> None:
        """The message for ``transfer``, or the next news without one, has come; or a second one,
        until the tag is forgotten."""


_EAGER_BYTES: Final = 2**18
"""UCX may hold a message up to so long; of a longer one it has the announcement alone. (Over TCP
and shared memory it changes from one to the other below 16,000 bytes.)"""
_ANNOUNCEMENT_BYTES: Final = 1024
_MAX_REMEMBERED: Final = 2**16


class MessageDropped(Exception):
    """The message that is expected came before, and was dropped."""


class Arrivals:
    """The arrivals of one worker. Every method is for the owner thread.

    Args:
        discard: frees a message.
        call_at: has a callback run at a ``time.monotonic()``.
        on_dropped: called for each message that is dropped.
        max_messages, max_bytes, max_seconds: how many messages that nobody expects yet may wait,
            how much memory of UCX they may take, and how long.
    """

    def __init__(
        self,
        *,
        discard: Callable[[Any], None],
        call_at: Callable[[float, Callable[[], None]], object],
        on_dropped: Callable[[DropCause], None],
        max_messages: int,
        max_bytes: int,
        max_seconds: float,
    ) -> None:
        self._discard = discard
        self._call_at = call_at
        self._on_dropped = on_dropped
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._expected: dict[int, tuple[Recipient, PostedTransfer | None]] = {}
        # In the order in which they came.
        self._waiting: dict[int, tuple[float, Any]] = {}
        self._waiting_bytes = 0
        self._dropped: dict[int, None] = {}
        self._unwanted: dict[int, None] = {}
        self._sweeping = False

    @property
    def waiting(self) -> int:
        """Messages that nobody expects yet."""
        return len(self._waiting)

    def expect(
        self, wire: int, recipient: Recipient, transfer: PostedTransfer | None
    ) -> Any | None:
        """Has ``recipient`` take each message whose tag is ``wire`` until it forgets it; one that
        is here already is returned instead.

        Raises:
            MessageDropped: it was here, and was dropped.
        """
        if self._dropped and wire in self._dropped:
            del self._dropped[wire]
            raise MessageDropped
        self._expected[wire] = (recipient, transfer)
        _, message = self._waiting.pop(wire, (0.0, None))
        if message is not None:
            self._waiting_bytes -= _held_bytes(message)
        return message

    def forget(self, wire: int, *, may_come: bool) -> None:
        """Nobody expects ``wire`` any more.

        Args:
            may_come: its sender may have sent it; it is no sign of a stranger when it comes.
        """
        self._expected.pop(wire, None)
        if may_come:
            _remember(self._unwanted, wire)

    def arrive(self, message: Any) -> None:
        """A message has come."""
        wire = message.sender_tag.value
        expected = self._expected.get(wire)
        if expected is not None:
            recipient, transfer = expected
            recipient.take(transfer, message)
        elif wire in self._unwanted:
            del self._unwanted[wire]
            self._drop(message, DropCause.LATE)
        elif wire in self._waiting:
            # Which one is the peer's, nobody can know: the offer for it fails.
            self._give_up(wire, DropCause.UNEXPECTED)
            self._drop(message, DropCause.UNEXPECTED)
        else:
            self._waiting[wire] = (time.monotonic(), message)
            self._waiting_bytes += _held_bytes(message)
            # The oldest, so that a flood is over when it ends.
            while len(self._waiting) > self._max_messages or self._waiting_bytes > self._max_bytes:
                self._give_up(next(iter(self._waiting)), DropCause.NO_ROOM)
            self._sweep_later()

    def clear(self) -> None:
        """Frees what waits. The worker ends, or has lost its peers."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        for _, message in waiting.values():
            self._discard(message)

    def _give_up(self, wire: int, cause: DropCause) -> None:
        """Drops a message that waits."""
        _, message = self._waiting.pop(wire)
        self._waiting_bytes -= _held_bytes(message)
        _remember(self._dropped, wire)
        self._drop(message, cause)

    def _drop(self, message: Any, cause: DropCause) -> None:
        self._discard(message)
        self._on_dropped(cause)

    def _sweep_later(self) -> None:
        if self._waiting and not self._sweeping:
            oldest, _ = next(iter(self._waiting.values()))
            self._sweeping = True
            self._call_at(oldest + self._max_seconds, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = False
        limit = time.monotonic() - self._max_seconds
        for wire, (arrived_at, _) in list(self._waiting.items()):
            if arrived_at > limit:
                break
            self._give_up(wire, DropCause.UNEXPECTED)
        self._sweep_later()


def _held_bytes(message: Any) -> int:
    """The bytes that UCX holds of a message, at most."""
    length: int = message.length
    return max(length, _ANNOUNCEMENT_BYTES) if length <= _EAGER_BYTES else _ANNOUNCEMENT_BYTES


def _remember(wires: dict[int, None], wire: int) -> None:
    """Adds to a set that forgets its oldest members."""
    if len(wires) >= _MAX_REMEMBERED:
        del wires[next(iter(wires))]
    wires[wire] = None
