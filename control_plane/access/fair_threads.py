"""Threads for many tenants, of which each has some to itself: none waits for another one's work,
and the operating system gives all that run the same share of the processors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

Result = TypeVar("Result")

MAX_THREADS = 256
"""Tenants that have work at the same moment, times the threads of each."""


class FairThreads:
    """Threads for what would hold up the event loop; on one event loop.

    Args:
        n: that work for an owner at a time.
        name: of each, with its number behind.
    """

    def __init__(self, n: int, name: str) -> None:
        self._n = n
        self._executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix=name)
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, owner: str, work: Callable[..., Result], *args: object) -> Result:
        """Return what ``work(*args)`` returns or raises, after what ``owner`` has asked for
        before."""
        async with self._places.setdefault(owner, asyncio.Semaphore(self._n)):
            return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)

    def close(self) -> None:
        """Begins nothing more; what runs goes on to its end."""
        self._executor.shutdown(wait=False, cancel_futures=True)
