"""A process that dies while it writes to another one through shared memory takes nobody else along.

Between the first and the last byte that it writes into a slot of the receiver's queue, a sender may
be stopped or killed. The slot never fills then, and UCX reads nothing behind it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from data_plane.buffer_pool import BufferPool
from data_plane.transport import (
    Address,
    ConnectFailed,
    Connection,
    NetworkRestarted,
    TransportError,
)
from data_plane.ucxx.settings import UcxxSettings
from data_plane.ucxx.transport import UcxxTransport
from tests.service.data_plane.listener import Listener
from tests.service.data_plane.peer import PeerProcess, running_peer, steps
from tests.service.data_plane.secret import SECRET, proven

LARGE = 2**26
"""A message of so many bytes is copied for tens of milliseconds, slot by slot."""

TRIES = 60
"""About a quarter of all stops come in the middle of a slot."""


def one_host() -> UcxxTransport:
    return UcxxTransport(UcxxSettings(one_host=True))


FACTORY = f"{__name__}:one_host"


@pytest.fixture
def victim() -> Iterator[Listener]:
    with closing(Listener(UcxxSettings(one_host=True))) as victim:
        yield victim


def reach(victim: UcxxTransport, peer: PeerProcess, seconds: float) -> Connection:
    """A connection to ``peer``, tried for ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return victim.connect(peer.address, b"", 0.5, secret=SECRET)[0]
        except (ConnectFailed, NetworkRestarted):
            if time.monotonic() > deadline:
                raise


def hears(victim: UcxxTransport, connection: Connection) -> bool:
    """Whether a healthy peer's answer comes through."""
    try:
        victim.probe(connection, 8, 1, 0.4)
    except TransportError:
        return False
    return True


def make_deaf(victim: UcxxTransport, writer: PeerProcess, healthy: PeerProcess) -> Connection:
    """Stops ``writer`` in the middle of a slot; returns a connection that ``healthy`` no longer
    gets through."""
    pool = BufferPool()
    for tag in range(TRIES):
        stream, _ = victim.connect(writer.address, steps(("put", tag, LARGE)), 5.0, secret=SECRET)
        other = victim.connect(healthy.address, b"", 5.0, secret=SECRET)[0]
        transfer = stream.offer(tag, pool.acquire(LARGE), 30.0)
        time.sleep(0.002 + 0.0005 * (tag % 20))
        writer.stop()
        if not hears(victim, other):
            return other
        writer.resume()
        transfer.wait(10.0)
        stream.close()
        other.close()
    pytest.fail(f"none of {TRIES} stops came in the middle of a slot")


def test_a_peer_killed_while_it_writes_takes_nobody_along(victim: Listener) -> None:
    with running_peer(FACTORY) as writer, running_peer(FACTORY) as healthy:
        lost = make_deaf(victim.transport, writer, healthy)
        writer.kill()
        began = time.monotonic()
        connection = reach(victim.transport, healthy, 5.0)
        assert time.monotonic() - began < 5.0
        assert hears(victim.transport, connection)
        assert victim.count("restarts_total") == 1
        assert lost.closed


def test_whoever_listened_listens_again_on_the_same_port(victim: Listener) -> None:
    with running_peer(FACTORY) as writer, running_peer(FACTORY) as healthy:
        make_deaf(victim.transport, writer, healthy)
        writer.kill()
        reach(victim.transport, healthy, 5.0)
    client = one_host()
    try:
        connection, answer = client.connect(victim.address, b"hello", 5.0, secret=SECRET)
        assert answer == b"welcome"
        arrived = threading.Event()
        pool = BufferPool()
        offered = victim.accepted[-1].offer(1, pool.acquire(100), 5.0)
        offered.add_done_callback(lambda _: arrived.set())
        connection.put(1, pool.acquire(100), 5.0).wait(5.0)
        assert arrived.wait(5.0)
    finally:
        client.close()


def test_a_stopped_peer_takes_nobody_along(victim: Listener) -> None:
    """It is found by a ping, and what it writes when it goes on disturbs nobody."""
    with running_peer(FACTORY) as writer, running_peer(FACTORY) as healthy:
        lost = make_deaf(victim.transport, writer, healthy)
        lost.ping(0.2)
        connection = reach(victim.transport, healthy, 5.0)
        writer.resume()
        time.sleep(0.2)
        assert hears(victim.transport, connection)


def test_a_death_between_slots_costs_no_connection(victim: Listener) -> None:
    with running_peer(FACTORY) as idle, running_peer(FACTORY) as healthy:
        victim.transport.connect(idle.address, b"", 5.0, secret=SECRET)
        other = victim.transport.connect(healthy.address, b"", 5.0, secret=SECRET)[0]
        idle.kill()
        time.sleep(1.0)
        assert hears(victim.transport, other)
        assert victim.count("restarts_total") == 0


def test_address_of_the_listener_is_free_after_close(victim: Listener) -> None:
    victim.transport.close()
    again = one_host()
    try:
        assert again.listen("127.0.0.1", victim.address.port, proven()) == Address(
            "127.0.0.1", victim.address.port
        )
    finally:
        again.close()
