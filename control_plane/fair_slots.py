"""A few places for many tenants: whoever holds least of them comes next.

With one queue for all, a tenant with a hundred jobs would be served a hundred times before another
one's only job.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """``n`` places; on one event loop.

    Args:
        n: how many tenants or jobs of a tenant may hold one at the same time.
    """

    def __init__(self, n: int) -> None:
        self._free = n
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def slot(self, owner: str) -> AsyncIterator[None]:
        """Holds a place for ``owner``; waits for one if there is none."""
        if self._free:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(owner, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._hand_on()
                raise
        self._held[owner] += 1
        try:
            yield
        finally:
            self._held[owner] -= 1
            if not self._held[owner]:
                del self._held[owner]
            self._hand_on()

    def _hand_on(self) -> None:
        """Gives a place to the first of the owners that hold least, or frees it."""
        while self._waiting:
            owner = min(self._waiting, key=lambda each: self._held[each])
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                # Behind the others that hold as much.
                self._waiting[owner] = turns
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1
