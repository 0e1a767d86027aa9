"""Streams of events: what one that was replaced keeps, and how many a member may have."""

from __future__ import annotations

import asyncio

from control_plane.jobs.subscriptions import MAX_STREAMS_OF_MEMBER, Subscriptions
from distca.contract.rpc_errors import Reason
from tests.support.errors import fails


def test_a_stream_that_was_replaced_keeps_no_events() -> None:
    subscriptions: Subscriptions[str] = Subscriptions(limit=8)
    replaced = subscriptions.open("rank", [b"event"])
    subscriptions.publish("rank", b"event")
    newer = subscriptions.open("rank", [b"event"])

    async def read() -> None:
        with fails(Reason.REPLACED):
            await anext(replaced.events())
        assert await anext(newer.events()) == b"event"

    asyncio.run(read())


def test_a_member_has_so_many_streams_until_one_has_ended() -> None:
    subscriptions: Subscriptions[str] = Subscriptions(limit=8)
    opened = [subscriptions.open("rank", []) for _ in range(MAX_STREAMS_OF_MEMBER)]
    with fails(Reason.BACKLOG):
        subscriptions.open("rank", [])
    subscriptions.open("another", [])
    assert not opened[-1].ended
    subscriptions.discard("rank", opened[0])
    subscriptions.open("rank", [])
    assert opened[-1].ended
