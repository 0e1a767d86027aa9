"""No tenant waits for what another one has asked for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from control_plane.access.fair_threads import FairThreads

DEADLINE_SECONDS = 10.0


@pytest.fixture
def threads() -> Iterator[FairThreads]:
    running = FairThreads(2, "work")
    yield running
    running.close()


def test_a_tenant_waits_for_its_own_work_alone(threads: FairThreads) -> None:
    async def scenario() -> None:
        over, begun = threading.Event(), threading.Semaphore(0)

        def work() -> None:
            begun.release()
            assert over.wait(DEADLINE_SECONDS)

        async with asyncio.timeout(DEADLINE_SECONDS):
            greedy = [asyncio.create_task(threads.run("greedy", work)) for _ in range(20)]
            for _ in range(2):
                await asyncio.to_thread(begun.acquire)
            assert [await threads.run("calm", int, at) for at in range(5)] == list(range(5))
            assert not begun.acquire(blocking=False), "two of a tenant run at a time"
            over.set()
            await asyncio.gather(*greedy)

    asyncio.run(scenario())


def test_who_stops_waiting_loses_no_place(threads: FairThreads) -> None:
    async def scenario() -> None:
        over = threading.Event()
        async with asyncio.timeout(DEADLINE_SECONDS):
            running = [asyncio.create_task(threads.run("a", over.wait, 10.0)) for _ in range(2)]
            waiting = [asyncio.create_task(threads.run("a", int, 0)) for _ in range(3)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            over.set()
            await asyncio.gather(*running)
            assert await asyncio.gather(*waiting[1:]) == [0, 0]
            assert await threads.run("a", int, 1) == 1

    asyncio.run(scenario())
