"""Streams of events to members: a bounded queue for each, ended with a reason."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import Generic, TypeAlias, TypeVar

from control_plane.errors import RefusedError
from distca.contract.rpc_errors import Reason

Key = TypeVar("Key", bound=Hashable)

Event: TypeAlias = bytes | Callable[[], bytes]
"""An encoded PlanEvent, or what makes it, off the event loop, once the reader has come so far."""

MAX_STREAMS_OF_MEMBER = 16
"""A stream that nobody reads stays until its connection ends, with the event that it writes."""


class Subscription:
    """The events of one member, from the event loop that published them to its stream.

    A reader that falls behind by more than ``limit`` events is dropped, so that one stuck process
    costs bounded memory and no one else's time.
    """

    def __init__(self, first: Sequence[Event], *, limit: int) -> None:
        self._queue: deque[Event] = deque(first)
        self._limit = limit + len(first)
        self._wake = asyncio.Event()
        self._wake.set()
        self._ended = False
        self._error: Exception | None = None

    @property
    def ended(self) -> bool:
        """No more events are taken."""
        return self._ended

    def publish(self, event: bytes) -> bool:
        """Queues ``event``; False if that ended the subscription, because its queue is full."""
        if self._ended:
            return True
        if len(self._queue) >= self._limit:
            self._queue.clear()
            self.end(
                RefusedError(
                    Reason.BACKLOG,
                    f"dropped: {self._limit} events wait and the reader takes none; watch again",
                )
            )
            return False
        self._queue.append(event)
        self._wake.set()
        return True

    def replace(self) -> None:
        """End the stream for a newer one, which begins with all that the member needs."""
        self._queue.clear()
        self.end(RefusedError(Reason.REPLACED, "a newer stream of the same lease took over"))

    def end(self, error: Exception | None = None) -> None:
        """Ends the stream, with ``error`` if given, after what is queued."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake.set()

    async def events(self) -> AsyncIterator[Event]:
        """The events, as they come."""
        while True:
            while self._queue:
                yield self._queue.popleft()
            if self._ended:
                if self._error is not None:
                    raise self._error
                return
            self._wake.clear()
            await self._wake.wait()


class Subscriptions(Generic[Key]):
    """One subscription per member; a newer one of the same member replaces the older. Each is to be
    discarded once its stream has ended."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._by_key: dict[Key, Subscription] = {}
        self._n_streams: Counter[Key] = Counter()

    def __len__(self) -> int:
        return len(self._by_key)

    def open(self, key: Key, first: Sequence[Event]) -> Subscription:
        """A subscription of ``key`` that begins with the events ``first``."""
        if self._n_streams[key] >= MAX_STREAMS_OF_MEMBER:
            raise RefusedError(
                Reason.BACKLOG,
                f"{MAX_STREAMS_OF_MEMBER} streams of the same lease are open, as many as one may "
                "have; read them to their end, or close their connections",
            )
        replaced = self._by_key.get(key)
        if replaced is not None:
            replaced.replace()
        self._n_streams[key] += 1
        subscription = self._by_key[key] = Subscription(first, limit=self._limit)
        return subscription

    def publish(self, key: Key, event: bytes) -> bool:
        """Queues ``event`` for ``key``, if it watches; False if it was dropped for that."""
        subscription = self._by_key.get(key)
        if subscription is None or subscription.publish(event):
            return True
        del self._by_key[key]
        return False

    def end(self, key: Key, error: RefusedError | None = None) -> None:
        """Ends the stream of ``key``, if it watches."""
        subscription = self._by_key.pop(key, None)
        if subscription is not None:
            subscription.end(error)

    def end_all(self, error: RefusedError) -> None:
        """Ends every stream."""
        for key in list(self._by_key):
            self.end(key, error)

    def discard(self, key: Key, subscription: Subscription) -> bool:
        """The stream of ``subscription`` has ended; returns whether it was the one of ``key``."""
        self._n_streams[key] -= 1
        if not self._n_streams[key]:
            del self._n_streams[key]
        if self._by_key.get(key) is not subscription:
            return False
        del self._by_key[key]
        return True
