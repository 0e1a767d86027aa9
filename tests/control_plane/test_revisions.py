"""Waiting for the next revision of something."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.errors import ShuttingDownError
from control_plane.network.revisions import Revisions

LONG_SECONDS = 60.0


async def waiting(revisions: Revisions) -> asyncio.Task[None]:
    task = asyncio.create_task(revisions.later_than(revisions.current, seconds=LONG_SECONDS))
    await asyncio.sleep(0)
    assert not task.done()
    return task


def test_every_revision_has_a_name_of_its_own() -> None:
    revisions, others = Revisions(), Revisions()
    names = {revisions.current, others.current}
    revisions.advance()
    others.advance()
    assert len(names | {revisions.current, others.current}) == 4


def test_a_wait_ends_with_the_next_revision() -> None:
    async def run() -> None:
        revisions = Revisions()
        first = await waiting(revisions)
        revisions.advance()
        await first
        second = await waiting(revisions)
        revisions.advance()
        await second

    asyncio.run(run())


def test_who_knows_an_older_one_does_not_wait() -> None:
    async def run() -> None:
        revisions = Revisions()
        known = revisions.current
        revisions.advance()
        await asyncio.wait_for(revisions.later_than(known, seconds=LONG_SECONDS), 5.0)

    asyncio.run(run())


def test_a_wait_ends_in_time_without_one() -> None:
    async def run() -> None:
        revisions = Revisions()
        await asyncio.wait_for(revisions.later_than(revisions.current, seconds=0.01), 5.0)

    asyncio.run(run())


def test_who_waits_at_the_end_is_refused_and_so_is_who_comes_later() -> None:
    async def run() -> None:
        revisions = Revisions()
        task = await waiting(revisions)
        revisions.end()
        with pytest.raises(ShuttingDownError):
            await task
        for known in (revisions.current, "another"):
            with pytest.raises(ShuttingDownError):
                await revisions.later_than(known, seconds=LONG_SECONDS)

    asyncio.run(run())
