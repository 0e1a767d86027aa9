"""The ucxx listener against clients that speak UCX but not our protocol."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from ucxx._lib import libucxx
from ucxx._lib.arr import Array

from data_plane.buffer_pool import BufferPool
from data_plane.greeting import MAX_BODY_BYTES
from data_plane.transport import (
    Address,
    PeerLost,
    TransportError,
)
from data_plane.ucxx.settings import UcxxSettings
from data_plane.ucxx.transport import UcxxTransport
from tests.service.data_plane.conformance import wait_all
from tests.service.data_plane.listener import Listener
from tests.service.data_plane.secret import SECRET, proven
from tests.support.waiting import eventually

MAGIC = b"DISTCA\x00\x04"


def greeting(status: int, body: bytes = b"") -> bytes:
    """What goes over the network."""
    return struct.pack("!8sII", MAGIC, status, len(body)) + body


class RawClient:
    """A bare UCX endpoint that sends whatever a test wants."""

    def __init__(self, address: Address) -> None:
        feature = libucxx.Feature
        options = UcxxSettings().context_options({})
        context = libucxx.UCXContext(options, (feature.TAG, feature.STREAM, feature.WAKEUP))
        self._worker = libucxx.UCXWorker(context)
        self._endpoint = libucxx.UCXEndpoint.create(self._worker, address.host, address.port, True)

    def send(self, payload: bytes) -> None:
        memory = np.frombuffer(payload, dtype=np.uint8)
        self._finish(self._endpoint.stream_send(Array(memory)))

    def receive(self, nbytes: int) -> bytes:
        memory = np.zeros(nbytes, dtype=np.uint8)
        self._finish(self._endpoint.stream_recv(Array(memory)))
        return memory.tobytes()

    def receive_greeting(self) -> tuple[int, bytes]:
        """Status and body of one."""
        magic, status, length = struct.unpack("!8sII", self.receive(16))
        assert magic == MAGIC
        return status, self.receive(length)

    def progress_until(self, condition: Callable[[], bool]) -> None:
        def progressed() -> bool:
            self._worker.progress()
            return condition()

        eventually(progressed)

    @property
    def lost(self) -> bool:
        return not self._endpoint.alive

    def _finish(self, request: Any) -> None:
        self.progress_until(lambda: bool(request.completed))
        request.check_error()


@pytest.fixture
def listener() -> Iterator[Listener]:
    settings = UcxxSettings(
        handshake_timeout_seconds=1.0, max_unclaimed_messages=10, max_unclaimed_seconds=2.0
    )
    with closing(Listener(settings)) as listener:
        yield listener


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (bytes(16), b"another program or version"),
        (struct.pack("!8sII", b"DISTCA\x00\x09", 1, 0), b"another program or version"),
        (struct.pack("!8sII", MAGIC, 1, MAX_BODY_BYTES + 1), b"MAX_BODY_BYTES"),
        (struct.pack("!8sII", MAGIC, 77, 0), b"status 77"),
        (greeting(2), b"expected a hello"),
        (greeting(1, bytes(10)), b"no room for nonce and proof"),
        (greeting(1, bytes(64) + b"\xff\xff" + bytes(600)), b"addresses have 255"),
        (greeting(1, bytes(64) + b"\x02\x02" + b"\xff\xff"), b"addresses have"),
        (greeting(1, bytes(64) + b"\x01\x01" + b"\xff\xff"), b"no text"),
        (greeting(1, bytes(66)), b"proof of the hello is wrong"),
    ],
)
def test_malformed_hello_is_refused_with_a_reason(
    listener: Listener, hello: bytes, reason: bytes
) -> None:
    client = RawClient(listener.address)
    assert client.receive_greeting()[0] == 0
    client.send(hello)
    status, said = client.receive_greeting()
    assert status == 4
    assert reason in said
    client.progress_until(lambda: client.lost)
    assert not listener.accepted


@pytest.mark.parametrize("beginning", [b"", MAGIC, struct.pack("!8sII", MAGIC, 1, 9) + b"half"])
def test_hello_that_never_ends_is_cut_off(listener: Listener, beginning: bytes) -> None:
    client = RawClient(listener.address)
    if beginning:
        client.send(beginning)
    start = time.monotonic()
    client.progress_until(lambda: client.lost)
    assert time.monotonic() - start < 5.0
    assert not listener.accepted


def test_messages_that_nobody_expects_are_bounded_and_only_their_own_offers_fail(
    listener: Listener,
) -> None:
    other = UcxxTransport()
    try:
        early, _ = other.connect(listener.address, b"", 5.0, secret=SECRET)
        pool = BufferPool()
        for tag in range(12):
            early.put(tag, pool.acquire(100), 5.0)
        eventually(lambda: listener.count("messages_dropped_total", "no-room") == 2)
        late, _ = other.connect(listener.address, b"", 5.0, secret=SECRET)
        at_server, beside = listener.accepted
        at_server.offer(3, pool.acquire(100), 5.0).wait(5.0)
        offer = beside.offer(1, pool.acquire(2**20), 5.0)
        wait_all([offer, late.put(1, pool.acquire(2**20), 5.0)])
        assert not at_server.closed
        # Its message will never come: better now than at its deadline.
        with pytest.raises(PeerLost):
            at_server.offer(0, pool.acquire(100), 5.0).wait(5.0)
        assert not beside.closed
    finally:
        other.close()


def test_messages_that_nobody_expects_wait_for_a_while(
    listener: Listener,
) -> None:
    other = UcxxTransport()
    try:
        connection, _ = other.connect(listener.address, b"", 5.0, secret=SECRET)
        pool = BufferPool()
        # One that UCX announces first, and one that it sends at once.
        connection.put(1, pool.acquire(2**22), 20.0)
        connection.put(2, pool.acquire(64), 20.0)
        eventually(lambda: listener.count("messages_dropped_total", "unexpected") == 2)
        with pytest.raises(PeerLost):
            listener.accepted[0].offer(2, pool.acquire(64), 5.0).wait(5.0)
    finally:
        other.close()


def test_tag_on_offer_cannot_be_offered_again(
    listener: Listener,
) -> None:
    connection, _ = listener.transport.connect(listener.address, b"to itself", 5.0, secret=SECRET)
    pool = BufferPool()
    connection.offer(5, pool.acquire(1), 5.0)
    with pytest.raises(ValueError):
        connection.offer(5, pool.acquire(1), 5.0)
    assert pool.stats().allocations == 2


def test_one_listener_per_transport(listener: Listener) -> None:
    with pytest.raises(TransportError):
        listener.transport.listen("127.0.0.1", 0, proven())
