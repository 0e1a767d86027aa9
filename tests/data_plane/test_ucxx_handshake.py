"""The ucxx listener against clients that speak UCX but not our protocol."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ucxx._lib import libucxx
from ucxx._lib.arr import Array

from data_plane.buffer_pool import BufferPool
from data_plane.transport import (
    MAX_HELLO_BYTES,
    Address,
    Connection,
    PeerLost,
    TransportError,
)
from data_plane.ucxx_settings import UcxxSettings
from data_plane.ucxx_transport import UcxxTransport
from tests.data_plane.conformance import eventually, listen

MAGIC = b"DISTCA\x00\x01"


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

    def progress_until(self, condition: Callable[[], bool]) -> None:
        def progressed() -> bool:
            self._worker.progress()
            return condition()

        eventually(progressed, 5.0)

    @property
    def lost(self) -> bool:
        return not self._endpoint.alive

    def _finish(self, request: Any) -> None:
        self.progress_until(lambda: bool(request.completed))
        request.check_error()


@pytest.fixture
def transport() -> Iterator[UcxxTransport]:
    transport = UcxxTransport(
        UcxxSettings(handshake_timeout_seconds=0.3, max_unclaimed_messages=10)
    )
    yield transport
    transport.close()


@pytest.fixture
def accepted() -> list[Connection]:
    return []


@pytest.fixture
def address(transport: UcxxTransport, accepted: list[Connection]) -> Address:
    return listen(transport, accepted)


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (bytes(20), b"another program or version"),
        (struct.pack("!8sIII", b"DISTCA\x00\x09", 1, 0, 0), b"another program or version"),
        (struct.pack("!8sIII", MAGIC, 1, 0, MAX_HELLO_BYTES + 1), b"MAX_HELLO_BYTES"),
        (struct.pack("!8sIII", MAGIC, 2**31, 0, 0), b"connection id"),
        (struct.pack("!8sIII", MAGIC, 1, 77, 0), b"status 77"),
        (struct.pack("!8sIII", MAGIC, 1, 1, 0), b"expected a hello"),
    ],
)
def test_malformed_hello_is_refused_with_a_reason(
    address: Address, accepted: list[Connection], hello: bytes, reason: bytes
) -> None:
    client = RawClient(address)
    client.send(hello)
    magic, _, status, length = struct.unpack("!8sIII", client.receive(20))
    assert (magic, status) == (MAGIC, 2)
    assert reason in client.receive(length)
    client.progress_until(lambda: client.lost)
    assert not accepted


@pytest.mark.parametrize("beginning", [b"", MAGIC, struct.pack("!8sIII", MAGIC, 1, 0, 9) + b"half"])
def test_hello_that_never_ends_is_cut_off(
    address: Address, accepted: list[Connection], beginning: bytes
) -> None:
    client = RawClient(address)
    if beginning:
        client.send(beginning)
    start = time.monotonic()
    client.progress_until(lambda: client.lost)
    assert time.monotonic() - start < 2.0
    assert not accepted


def test_listener_lives_on_after_bad_clients(transport: UcxxTransport, address: Address) -> None:
    silent, garbage = RawClient(address), RawClient(address)
    garbage.send(bytes(range(20)))
    other = UcxxTransport()
    try:
        assert other.connect(address, b"good", 5.0)[1] == b"welcome good"
    finally:
        other.close()
    silent.progress_until(lambda: silent.lost)


def test_too_many_unclaimed_messages_end_the_connection(
    transport: UcxxTransport, address: Address, accepted: list[Connection]
) -> None:
    other = UcxxTransport()
    try:
        connection, _ = other.connect(address, b"", 5.0)
        ended: list[TransportError | None] = []
        accepted[0].add_closed_callback(ended.append)
        buffer = BufferPool().acquire(100)
        for tag in range(11):
            connection.put(tag, buffer, 5.0)
        eventually(lambda: len(ended) == 1)
        assert "max_unclaimed_messages=10" in str(ended[0])
        with pytest.raises(PeerLost, match="max_unclaimed_messages=10"):
            accepted[0].put(1, buffer, 5.0).wait(5.0)
    finally:
        other.close()


def test_tag_on_offer_cannot_be_offered_again(
    transport: UcxxTransport, address: Address, accepted: list[Connection]
) -> None:
    connection, _ = transport.connect(address, b"to itself", 5.0)
    pool = BufferPool()
    connection.offer(5, pool.acquire(1), 5.0)
    with pytest.raises(ValueError, match="tag 5 is already on offer"):
        connection.offer(5, pool.acquire(1), 5.0)
    assert pool.stats().allocations == 2


def test_one_listener_per_transport(transport: UcxxTransport, address: Address) -> None:
    with pytest.raises(TransportError, match="listens already"):
        transport.listen("127.0.0.1", 0, lambda hello, connection: b"")
