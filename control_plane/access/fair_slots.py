"""A few places for many tenants: whoever holds least of them comes next.

With one queue for all, a tenant with a hundred jobs would be served a hundred times before another
one's only job.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

Result = TypeVar("Result")


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


class FairThreads:
    """Threads for what would hold up the event loop; owners take turns.

    Args:
        n: of threads.
        name: of each, with its number behind.
    """

    def __init__(self, n: int, name: str) -> None:
        self._slots = FairSlots(n)
        self._executor = ThreadPoolExecutor(max_workers=n, thread_name_prefix=name)

    async def run(self, owner: str, work: Callable[..., Result], *args: object) -> Result:
        """What ``work(*args)`` returns or raises, when it is the turn of ``owner``."""
        async with self._slots.slot(owner):
            return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)

    def close(self) -> None:
        """Begins nothing more; what runs goes on to its end."""
        self._executor.shutdown(wait=False, cancel_futures=True)
