"""Strangers on the data network: what they send over real UCX is not taken, and harms nobody.

A stranger here knows what whoever watches the network knows: addresses, the bytes of handshakes,
job, rank, and the order of ticks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
from ucxx._lib import libucxx
from ucxx._lib.arr import Array

from data_plane.base_connection import BaseConnection
from data_plane.buffer_pool import BufferPool
from data_plane.transport import (
    Address,
    Claim,
    Connection,
    HandshakeRejected,
    PeerLost,
    Transfer,
    TransferState,
    TransportError,
)
from data_plane.ucxx.settings import UcxxSettings
from data_plane.ucxx.transport import UcxxTransport
from data_plane.ucxx.wire_tags import WireTags
from tests.service.data_plane.conformance import pattern
from tests.service.data_plane.listener import Listener
from tests.service.data_plane.secret import SECRET
from tests.service.data_plane.test_ucxx_handshake import RawClient, greeting
from tests.service.security.recording_proxy import recording
from tests.support.waiting import eventually

WAIT_SECONDS = 10.0
PUT_SECONDS = 60.0
KNOWN_SECONDS = 3.0
ARRIVED_SECONDS = 0.3
MESSAGES = 200


class Attacker(RawClient):
    """A bare UCX endpoint that also sends tagged messages."""

    def put(self, wire: int, payload: bytes) -> None:
        memory = np.frombuffer(payload, dtype=np.uint8)
        self._finish(self._endpoint.tag_send(Array(memory), libucxx.UCXXTag(wire)))


def suppressed(function: Callable[..., None]) -> Callable[..., None]:
    """Whatever becomes of what a stranger sends."""

    def run(*args: object) -> None:
        with suppress(Exception):
            function(*args)

    return run


@pytest.fixture
def server() -> Iterator[Listener]:
    settings = UcxxSettings(max_unclaimed_messages=50, max_unclaimed_seconds=1.0)
    with closing(Listener(settings)) as server:
        yield server


@pytest.fixture
def client() -> Iterator[UcxxTransport]:
    with closing(UcxxTransport()) as transport:
        yield transport


def guesses(connection_id: int) -> list[int]:
    """Tags of the layouts that somebody might try who has read some version of this code."""
    numbers = range(MESSAGES // 4)
    return [
        *((connection_id << 1) << 32 | number for number in numbers),
        *((connection_id << 1 | 1) << 32 | number for number in numbers),
        *numbers,
        *(WireTags(bytes(32)).of(0, number) for number in numbers),
    ]


def test_forged_rows_and_close_notices_are_dropped_counted_and_close_nothing(
    server: Listener, client: UcxxTransport
) -> None:
    connection, _ = client.connect(server.address, b"rank 0", WAIT_SECONDS, secret=SECRET)
    (at_server,) = server.accepted
    pool = BufferPool()
    buffers = [pool.acquire(64) for _ in range(8)]
    offers = [at_server.offer(tag, buffer, WAIT_SECONDS) for tag, buffer in enumerate(buffers)]
    attacker = Attacker(server.address)
    attacker.receive_greeting()
    forged = b"\0closed by somebody else".ljust(64)
    for wire in guesses(connection_id=0):
        attacker.put(wire, forged)
    eventually(
        lambda: (
            server.count("messages_dropped_total", "no-room")
            + server.count("messages_dropped_total", "unexpected")
            == MESSAGES
        )
    )
    assert {offer.state for offer in offers} == {TransferState.PENDING}
    assert not at_server.closed
    for tag, (offer, buffer) in enumerate(zip(offers, buffers, strict=True)):
        sent = pool.acquire(64)
        sent.tensor.copy_(pattern(64, tag))
        connection.put(tag, sent, WAIT_SECONDS)
        offer.wait(WAIT_SECONDS)
        assert buffer.tensor.equal(pattern(64, tag))
    assert not connection.closed


@dataclass
class Watched:
    """A connection, and a stranger who reads the tag of each of its messages."""

    at_client: Connection
    at_server: BaseConnection
    attacker: Attacker
    pool: BufferPool = field(default_factory=BufferPool)

    def wire(self, channel: int, number: int) -> int:
        wire: int = self.at_client._outgoing.of(channel, number)  # type: ignore[attr-defined]
        return wire

    def forge(self, tag: int, nbytes: int) -> None:
        self.attacker.put(self.wire(0, tag), bytes(nbytes))

    def put(self, tag: int, nbytes: int) -> Transfer:
        return self.at_client.put(tag, self.pool.acquire(nbytes), PUT_SECONDS)

    def offer(self, tag: int, nbytes: int) -> Transfer:
        return self.at_server.offer(tag, self.pool.acquire(nbytes), WAIT_SECONDS)


@pytest.fixture
def watched(server: Listener, client: UcxxTransport) -> Watched:
    connection, _ = client.connect(server.address, b"rank 0", WAIT_SECONDS, secret=SECRET)
    (at_server,) = server.accepted
    assert isinstance(at_server, BaseConnection)
    attacker = Attacker(server.address)
    attacker.receive_greeting()
    return Watched(connection, at_server, attacker)


def test_news_that_are_sent_again_are_dropped(server: Listener, watched: Watched) -> None:
    watched.at_client.skip(7)
    watched.offer(7, 64).wait(WAIT_SECONDS)
    watched.attacker.put(watched.wire(2, 0), b"\0forged close notice".ljust(64))
    eventually(lambda: server.count("messages_dropped_total", "unexpected") == 1)
    assert not watched.at_server.closed


@pytest.mark.parametrize("news", [b"\x01forged: finished", b"", b"\x22" + bytes(7) + b"\1"])
def test_news_that_come_before_the_peers_own_close_nothing_in_its_name(
    watched: Watched, news: bytes
) -> None:
    """Close notices and skips, under the tag of news that the peer is just sending."""
    offer = watched.offer(1, 64)
    watched.attacker.put(watched.wire(2, 0), news + bytes(17))
    eventually(lambda: watched.at_server.closed)
    assert type(watched.at_server.error) is PeerLost
    eventually(lambda: offer.state is TransferState.FAILED)


@pytest.mark.parametrize("nbytes", [64, 2**20])
def test_a_second_message_under_a_tag_ends_the_connection(watched: Watched, nbytes: int) -> None:
    offer = watched.offer(1, nbytes)
    watched.put(1, nbytes)
    offer.wait(WAIT_SECONDS)
    watched.forge(1, nbytes)
    eventually(lambda: watched.at_server.closed and watched.at_client.closed)
    assert isinstance(watched.at_server.error, PeerLost)


@pytest.mark.parametrize("forged_bytes", [2**20, 2**19])
@pytest.mark.parametrize("offered_first", [True, False])
def test_a_put_that_lost_against_a_forged_message_ends_within_seconds(
    watched: Watched, offered_first: bool, forged_bytes: int
) -> None:
    nbytes = 2**20
    offers = [watched.offer(1, nbytes)] if offered_first else []
    # Its sender would be told when it is taken; nobody answers the one that came too early.
    threading.Thread(target=suppressed(watched.forge), args=(1, forged_bytes), daemon=True).start()
    if offered_first:
        eventually(lambda: offers[0].state is not TransferState.PENDING)
    else:
        time.sleep(ARRIVED_SECONDS)
    began = time.monotonic()
    put = watched.put(1, nbytes)
    if not offered_first:
        time.sleep(ARRIVED_SECONDS)
        offers.append(watched.offer(1, nbytes))
    eventually(lambda: put.state is not TransferState.PENDING and watched.at_client.closed)
    assert time.monotonic() - began < KNOWN_SECONDS
    assert isinstance(watched.at_server.error, TransportError)


@pytest.mark.parametrize("nbytes", [2**20, 2**30 + 4096])
def test_a_long_message_to_nobody_holds_no_memory(server: Listener, nbytes: int) -> None:
    """Its bytes are never fetched, and its sender is told that they were."""
    attacker = Attacker(server.address)
    attacker.receive_greeting()
    attacker.put(12345, bytes(nbytes))
    eventually(lambda: server.count("messages_dropped_total", "unexpected") == 1)


class Tap:
    """A listener's side of handshakes, seen by a watcher: what clients have sent."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []

    def accept(self, claim: Claim, connection: Connection) -> bytes:
        self.claims.append(claim)
        claim.check(SECRET)
        return b"welcome"


def recorded_hello(claim: Claim) -> bytes:
    """The body of the greeting that the claim came in."""
    transcript = claim._transcript  # type: ignore[attr-defined]
    ends = [transcript.ends.client.encode(), transcript.ends.server.encode()]
    proof: bytes = claim._proof  # type: ignore[attr-defined]
    lengths = bytes(len(end) for end in ends)
    whole: bytes = transcript.client_nonce + proof + lengths + b"".join(ends) + claim.hello
    return whole


def test_a_recorded_hello_is_worth_nothing_and_holds_no_token(client: UcxxTransport) -> None:
    tap = Tap()
    with closing(Listener(accept=tap.accept)) as server:
        client.connect(server.address, b"rank 0, epoch 1", WAIT_SECONDS, secret=SECRET)
        recorded = recorded_hello(tap.claims[0])
        assert SECRET not in recorded
        attacker = Attacker(server.address)
        attacker.receive_greeting()
        attacker.send(greeting(1, recorded))
        status, said = attacker.receive_greeting()
        assert (status, said) == (4, b"\x00the proof of the hello is wrong")
        # It was heard as it was sent the first time.
        assert recorded_hello(tap.claims[1]) == recorded
        assert server.count("handshakes_refused_total", "proof") == 1


def test_a_relay_is_found_and_sees_no_secret(server: Listener, client: UcxxTransport) -> None:
    """Somebody in between, or address translation: both ends know other addresses."""
    target = (server.address.host, server.address.port)
    with recording(target) as relay:
        with pytest.raises(HandshakeRejected):
            client.connect(Address("127.0.0.1", relay.port), b"rank 0", 3.0, secret=SECRET)
        seen = relay.recorded()
    assert seen
    assert not any(SECRET in each for each in seen)


def test_a_server_without_the_key_is_refused(client: UcxxTransport) -> None:
    """It may say that it accepts; it cannot prove it."""

    def pretend(claim: Claim, connection: Connection) -> bytes:
        # As if its proof had been right: whoever listens decides what to believe.
        claim._secret = b"not the key"  # type: ignore[attr-defined]
        return b"welcome"

    with closing(UcxxTransport()) as impostor:
        address = impostor.listen("127.0.0.1", 0, pretend)
        with pytest.raises(HandshakeRejected) as refused:
            client.connect(address, b"rank 0", WAIT_SECONDS, secret=SECRET)
    assert not refused.value.proven
