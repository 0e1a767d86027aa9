"""Places go to whoever holds least of them."""

from __future__ import annotations

import asyncio

from control_plane.access.fair_slots import FairSlots

DEADLINE_SECONDS = 10.0


def run_in_order(n: int, owners: list[str]) -> list[str]:
    """In which order jobs of ``owners``, which all come at once, are done."""
    order: list[str] = []

    async def job(slots: FairSlots, owner: str) -> None:
        async with slots.slot(owner):
            order.append(owner)
            await asyncio.sleep(0)

    async def all_jobs() -> None:
        slots = FairSlots(n)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await asyncio.gather(*(job(slots, owner) for owner in owners))

    asyncio.run(all_jobs())
    return order


def test_one_job_of_another_tenant_comes_next() -> None:
    assert run_in_order(1, ["greedy"] * 20 + ["calm"]).index("calm") <= 2


def test_tenants_take_turns() -> None:
    order = run_in_order(1, ["a"] * 4 + ["b"] * 4 + ["c"] * 4)
    assert [set(order[i : i + 3]) for i in (1, 4, 7)] == [{"a", "b", "c"}] * 3


def test_a_tenant_alone_has_all_places() -> None:
    async def hold_all() -> None:
        slots = FairSlots(3)
        async with (
            asyncio.timeout(DEADLINE_SECONDS),
            slots.slot("a"),
            slots.slot("a"),
            slots.slot("a"),
        ):
            pass

    asyncio.run(hold_all())


def test_who_stops_waiting_loses_no_place() -> None:
    async def stop_waiting() -> None:
        slots = FairSlots(1)

        async def wait() -> None:
            async with slots.slot("b"):
                raise AssertionError("it has been cancelled")

        async with asyncio.timeout(DEADLINE_SECONDS):
            async with slots.slot("a"):
                waiting = [asyncio.create_task(wait()) for _ in range(3)]
                await asyncio.sleep(0)
                waiting[0].cancel()
                await asyncio.sleep(0)
            # The place is the second one's by now.
            for each in waiting[1:]:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            async with slots.slot("c"):
                pass

    asyncio.run(stop_waiting())
