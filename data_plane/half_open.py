"""Connections that have not proven anything yet, in a number that has an end.

When there are too many, the oldest of the host that has most of them goes. So who opens them by the
thousand puts out their own, and a member, which needs moments, gets through.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, TypeVar

_SHARE_OF_FILES: Final = 8

KeyT = TypeVar("KeyT", bound=Hashable)


def half_open_limit(wanted: int) -> int:
    """``wanted``, or an eighth of the files that this process may have open (``ulimit -n``) if that
    is less: a connection takes one or two."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft < 0 else max(1, min(wanted, soft // _SHARE_OF_FILES))


class HalfOpen(Generic[KeyT]):
    """Those of one port. For one thread.

    Args:
        limit: how many there may be.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._host_of: dict[KeyT, str] = {}
        # By host, each in the order in which they came.
        self._hosts: dict[str, dict[KeyT, Callable[[], None]]] = {}

    def __len__(self) -> int:
        return len(self._host_of)

    def __contains__(self, key: KeyT) -> bool:
        return key in self._host_of

    def __iter__(self) -> Iterator[KeyT]:
        """The oldest first; a reader may have some leave."""
        return iter(list(self._host_of))

    def enter(self, key: KeyT, host: str, put_out: Callable[[], None]) -> None:
        """A connection has come; if it is one too many, one of them is put out.

        Args:
            key: the connection.
            host: where it comes from.
            put_out: ends it; called at most once, after it has left.
        """
        self._host_of[key] = host
        self._hosts.setdefault(host, {})[key] = put_out
        if len(self._host_of) > self._limit:
            self.put_one_out()

    def leave(self, key: KeyT) -> None:
        """It has proven itself, or has ended; nothing if it is not here."""
        host = self._host_of.pop(key, None)
        if host is not None:
            mine = self._hosts[host]
            del mine[key]
            if not mine:
                del self._hosts[host]

    def put_one_out(self) -> bool:
        """Puts out the oldest of the host that has most; returns whether there was one."""
        if not self._hosts:
            return False
        crowd = max(self._hosts.values(), key=len)
        key, put_out = next(iter(crowd.items()))
        self.leave(key)
        put_out()
        return True
