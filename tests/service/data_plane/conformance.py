"""What every transport must do. A transport's tests subclass ``TransportConformance``."""

from __future__ import annotations

import contextlib
import functools
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import psutil
import pytest
import torch

from data_plane.buffer_pool import BufferAllocator, BufferPool, PooledBuffer, host_allocator
from data_plane.transport import (
    MAX_HELLO_BYTES,
    MAX_TAG,
    Address,
    ClaimRefused,
    ConnectFailed,
    Connection,
    HandshakeRejected,
    MessageSizeMismatch,
    PeerClosed,
    PeerLost,
    Transfer,
    TransferState,
    TransferTimeout,
    Transport,
    TransportClosed,
    TransportError,
)
from tests.service.data_plane.peer import FILL, PeerProcess, running_peer, steps
from tests.service.data_plane.secret import SECRET, proven
from tests.support.waiting import eventually

SIZES = [0, 1, 7, 8191, 8192, 2**20 + 3, 4 * 2**20]
WAIT_SECONDS = 10.0
LARGE_BYTES = 64 * 2**20


@dataclass
class Pair:
    """A client and a server in this process, one connection, one pool."""

    client: Transport
    server: Transport
    address: Address
    at_client: Connection
    at_server: Connection
    pool: BufferPool
    accepted: list[Connection] = field(default_factory=list)

    def filled(self, nbytes: int, seed: int = 0) -> PooledBuffer:
        buffer = self.pool.acquire(nbytes)
        buffer.tensor.copy_(pattern(nbytes, seed))
        return buffer


@functools.cache
def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """Bytes in which a shifted, cut or swapped message shows."""
    index = np.arange(nbytes, dtype=np.uint64)
    return torch.from_numpy(((index * 31 + (index >> 8) * 17 + seed * 101) % 251).astype(np.uint8))


def listen(transport: Transport, accepted: list[Connection]) -> Address:
    """Has ``transport`` listen on loopback and accept everyone, into ``accepted``."""

    def accept(hello: bytes, connection: Connection) -> bytes:
        accepted.append(connection)
        return b"welcome " + hello

    return transport.listen("127.0.0.1", 0, proven(accept))


def wait_all(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait(WAIT_SECONDS)


class TransportConformance:
    """The suite. Subclasses give the two factories below, and may give another memory."""

    peer_factory: str
    """``module:function`` that makes the transport, for peers in processes of their own."""

    stops_transfers = True
    """Whether closing a connection stops its transfers. If not, their buffers stay out of the pool
    until the peer has gone on or has died."""

    loss_of_a_killed_peer: type[PeerLost] = PeerLost
    """What a connection to a killed process ends with."""

    def make_transport(self) -> Transport:
        raise NotImplementedError

    def allocator(self) -> BufferAllocator:
        return host_allocator

    @pytest.fixture
    def transport(self) -> Iterator[Transport]:
        transport = self.make_transport()
        yield transport
        transport.close()

    @pytest.fixture
    def server(self) -> Iterator[Transport]:
        transport = self.make_transport()
        yield transport
        transport.close()

    @pytest.fixture
    def pool(self) -> BufferPool:
        return BufferPool(self.allocator())

    @pytest.fixture
    def pair(self, transport: Transport, server: Transport, pool: BufferPool) -> Pair:
        accepted: list[Connection] = []
        address = listen(server, accepted)
        connection, answer = transport.connect(address, b"client", WAIT_SECONDS, secret=SECRET)
        assert answer == b"welcome client"
        return Pair(transport, server, address, connection, accepted[0], pool, accepted)

    @pytest.fixture
    def peer(self) -> Iterator[PeerProcess]:
        with running_peer(self.peer_factory) as peer:
            yield peer

    # Moving bytes

    @pytest.mark.parametrize("nbytes", SIZES)
    @pytest.mark.parametrize("offer_first", [True, False])
    def test_message_arrives_unchanged(self, pair: Pair, nbytes: int, offer_first: bool) -> None:
        sent, received = pair.filled(nbytes), pair.pool.acquire(nbytes)
        received.tensor.fill_(255)
        if offer_first:
            offer = pair.at_server.offer(1, received, WAIT_SECONDS)
            put = pair.at_client.put(1, sent, WAIT_SECONDS)
        else:
            put = pair.at_client.put(1, sent, WAIT_SECONDS)
            time.sleep(0.05)
            offer = pair.at_server.offer(1, received, WAIT_SECONDS)
        wait_all([offer, put])
        assert torch.equal(received.tensor, sent.tensor)
        assert offer.state is put.state is TransferState.DONE
        assert (offer.tag, offer.nbytes, offer.error) == (1, nbytes, None)

    def test_smallest_and_largest_tag(self, pair: Pair) -> None:
        for tag in (0, MAX_TAG):
            sent, received = pair.filled(64, tag % 7), pair.pool.acquire(64)
            offer = pair.at_server.offer(tag, received, WAIT_SECONDS)
            wait_all([offer, pair.at_client.put(tag, sent, WAIT_SECONDS)])
            assert torch.equal(received.tensor, sent.tensor)

    @pytest.mark.parametrize("tag", [-1, MAX_TAG + 1])
    def test_tag_out_of_range_is_the_callers_mistake(self, pair: Pair, tag: int) -> None:
        buffer = pair.pool.acquire(1)
        with pytest.raises(ValueError):
            pair.at_client.put(tag, buffer, 1.0)
        with pytest.raises(ValueError):
            pair.at_client.offer(tag, buffer, 1.0)
        with pytest.raises(ValueError):
            pair.at_client.skip(tag)

    def test_times_and_lengths_out_of_range_are_the_callers_mistake(self, pair: Pair) -> None:
        with pytest.raises(ValueError):
            pair.at_client.put(1, pair.pool.acquire(1), 0.0)
        with pytest.raises(ValueError):
            pair.at_client.ping(0.0)
        with pytest.raises(ValueError):
            pair.client.connect(pair.address, bytes(MAX_HELLO_BYTES + 1), 1.0, secret=SECRET)

    @pytest.mark.parametrize("offer_first", [True, False])
    def test_skipped_message_ends_its_offer_and_no_other(
        self, pair: Pair, offer_first: bool
    ) -> None:
        untouched, other = pair.filled(1024, 7), pair.pool.acquire(64)
        kept = untouched.tensor.clone()
        if offer_first:
            skipped = pair.at_server.offer(5, untouched, WAIT_SECONDS)
            beside = pair.at_server.offer(6, other, WAIT_SECONDS)
            pair.at_client.skip(5)
        else:
            pair.at_client.skip(5)
            time.sleep(0.05)
            skipped = pair.at_server.offer(5, untouched, WAIT_SECONDS)
            beside = pair.at_server.offer(6, other, WAIT_SECONDS)
        skipped.wait(WAIT_SECONDS)
        assert (skipped.state, skipped.error) == (TransferState.SKIPPED, None)
        assert torch.equal(untouched.tensor, kept)
        assert beside.state is TransferState.PENDING
        # The next message with the tag is another one.
        received = pair.pool.acquire(64)
        again = pair.at_server.offer(5, received, WAIT_SECONDS)
        puts = [pair.at_client.put(tag, pair.filled(64, tag), WAIT_SECONDS) for tag in (5, 6)]
        wait_all([again, beside, *puts])
        assert torch.equal(received.tensor.cpu(), pattern(64, 5))
        assert torch.equal(other.tensor.cpu(), pattern(64, 6))

    def test_many_tags_out_of_order(self, pair: Pair) -> None:
        shuffled = random.Random(1)
        nbytes = {tag: shuffled.choice([0, 5, 4096, 70_000]) for tag in range(200)}
        tags = list(nbytes)
        shuffled.shuffle(tags)
        received = {tag: pair.pool.acquire(nbytes[tag]) for tag in tags}
        transfers = [pair.at_server.offer(t, received[t], WAIT_SECONDS) for t in tags[:100]]
        sending = sorted(tags, key=lambda tag: shuffled.random())
        transfers += [
            pair.at_client.put(t, pair.filled(nbytes[t], t), WAIT_SECONDS) for t in sending
        ]
        transfers += [pair.at_server.offer(t, received[t], WAIT_SECONDS) for t in tags[100:]]
        wait_all(transfers)
        for tag in tags:
            assert torch.equal(received[tag].tensor.cpu(), pattern(nbytes[tag], tag)), tag

    def test_two_ways_at_once(self, pair: Pair) -> None:
        ends = [pair.at_client, pair.at_server]
        sent = [pair.filled(4 * 2**20 + 1, seed) for seed in range(2)]
        received = [pair.pool.acquire(4 * 2**20 + 1) for _ in range(2)]
        transfers = []
        for side in range(2):
            transfers.append(ends[side].offer(5, received[side], WAIT_SECONDS))
            transfers.append(ends[side].put(5, sent[side], WAIT_SECONDS))
        wait_all(transfers)
        assert torch.equal(received[0].tensor, sent[1].tensor)
        assert torch.equal(received[1].tensor, sent[0].tensor)

    def test_many_connections_keep_equal_tags_apart(self, pair: Pair) -> None:
        clients = [pair.at_client]
        threads = [
            threading.Thread(
                target=lambda: clients.append(
                    pair.client.connect(pair.address, b"client", WAIT_SECONDS, secret=SECRET)[0]
                )
            )
            for _ in range(11)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        eventually(lambda: len(pair.accepted) == 12)
        puts, offers = [], []
        for number, client in enumerate(clients):
            puts.append(client.put(3, pair.filled(1000, number), WAIT_SECONDS))
        received = [pair.pool.acquire(1000) for _ in pair.accepted]
        for connection, buffer in zip(pair.accepted, received, strict=True):
            offers.append(connection.offer(3, buffer, WAIT_SECONDS))
        wait_all(puts + offers)
        seen = {bytes(buffer.tensor.cpu().tolist()) for buffer in received}
        assert seen == {bytes(pattern(1000, number).tolist()) for number in range(12)}

    def test_listener_can_use_the_connection_in_its_accept(
        self, transport: Transport, server: Transport, pool: BufferPool
    ) -> None:
        sent = pool.acquire(100_000)
        sent.tensor.copy_(pattern(100_000, 4))

        def accept(hello: bytes, connection: Connection) -> bytes:
            connection.put(1, sent, WAIT_SECONDS)
            return b""

        address = server.listen("127.0.0.1", 0, proven(accept))
        connection, _ = transport.connect(address, b"", WAIT_SECONDS, secret=SECRET)
        received = pool.acquire(100_000)
        connection.offer(1, received, WAIT_SECONDS).wait(WAIT_SECONDS)
        assert torch.equal(received.tensor, sent.tensor)

    # Callbacks, waiting, buffers

    def test_done_callbacks(self, pair: Pair) -> None:
        called = threading.Event()
        received = pair.pool.acquire(10)
        offer = pair.at_server.offer(1, received, WAIT_SECONDS)
        offer.add_done_callback(lambda transfer: called.set())
        assert not called.is_set()
        pair.at_client.put(1, pair.filled(10), WAIT_SECONDS)
        assert called.wait(WAIT_SECONDS)
        late: list[Transfer] = []
        offer.add_done_callback(late.append)
        assert late == [offer]

    def test_callback_can_start_the_next_transfer(self, pair: Pair) -> None:
        done = threading.Event()
        received = [pair.pool.acquire(10) for _ in range(20)]

        def offer_next(transfer: Transfer) -> None:
            if transfer.tag == 19:
                done.set()
                return
            tag = transfer.tag + 1
            pair.at_server.offer(tag, received[tag], WAIT_SECONDS).add_done_callback(offer_next)

        pair.at_server.offer(0, received[0], WAIT_SECONDS).add_done_callback(offer_next)
        for tag in range(20):
            pair.at_client.put(tag, pair.filled(10, tag), WAIT_SECONDS)
        assert done.wait(WAIT_SECONDS)
        for tag in range(20):
            assert torch.equal(received[tag].tensor.cpu(), pattern(10, tag))

    def test_wait_gives_up_but_the_transfer_goes_on(self, pair: Pair) -> None:
        received = pair.pool.acquire(10)
        offer = pair.at_server.offer(1, received, WAIT_SECONDS)
        with pytest.raises(TransferTimeout):
            offer.wait(0.05)
        assert offer.state is TransferState.PENDING
        pair.at_client.put(1, pair.filled(10), WAIT_SECONDS)
        offer.wait(WAIT_SECONDS)

    def test_pending_transfer_keeps_its_buffer(self, pair: Pair) -> None:
        received = pair.pool.acquire(2**20)
        where = received.tensor.data_ptr()
        offer = pair.at_server.offer(1, received, WAIT_SECONDS)
        received.release()
        other = pair.pool.acquire(2**20)
        assert other.tensor.data_ptr() != where
        other.tensor.fill_(99)
        pair.at_client.put(1, pair.filled(2**20), WAIT_SECONDS)
        offer.wait(WAIT_SECONDS)
        assert bool((other.tensor == 99).all())
        eventually(lambda: pair.pool.stats().idle_bytes > 0)

    @pytest.mark.parametrize("closed_before", [True, False])
    def test_failed_put_keeps_its_buffer_until_its_bytes_are_written(
        self, pair: Pair, closed_before: bool
    ) -> None:
        """A kernel that is launched writes them, whatever becomes of the connection."""
        written = threading.Event()
        buffer = pair.filled(100_000)
        if closed_before:
            pair.at_client.close()
        put = pair.at_client.put(1, buffer, WAIT_SECONDS, ready=written.is_set)
        buffer.release()
        pair.at_client.close()
        with pytest.raises(TransportError):
            put.wait(WAIT_SECONDS)
        time.sleep(0.05)
        assert pair.pool.stats().idle_bytes == 0
        written.set()
        eventually(lambda: pair.pool.stats().in_use_bytes == 0)

    def test_steady_state_allocates_nothing(self, pair: Pair) -> None:
        allocations = []
        for tag in range(20):
            if tag == 10 and torch.cuda.is_initialized():
                from_device = torch.cuda.memory_stats()["num_device_alloc"]
            sent, received = pair.filled(100_000), pair.pool.acquire(100_000)
            offer = pair.at_server.offer(tag, received, WAIT_SECONDS)
            wait_all([offer, pair.at_client.put(tag, sent, WAIT_SECONDS)])
            sent.release()
            received.release()
            allocations.append(pair.pool.stats().allocations)
        assert allocations[0] == allocations[-1]
        if torch.cuda.is_initialized():
            assert torch.cuda.memory_stats()["num_device_alloc"] == from_device

    # A wrong plan

    @pytest.mark.parametrize("nbytes", [100, 50_000])
    @pytest.mark.parametrize("offered_first", [True, False])
    @pytest.mark.parametrize("difference", [-1, 1])
    def test_wrong_size_is_an_error_and_ends_the_connection(
        self, pair: Pair, nbytes: int, offered_first: bool, difference: int
    ) -> None:
        received = pair.pool.acquire(nbytes + difference)
        received.tensor.fill_(1)
        before = received.tensor.clone()
        if offered_first:
            offer = pair.at_server.offer(1, received, WAIT_SECONDS)
            pair.at_client.put(1, pair.filled(nbytes), WAIT_SECONDS)
        else:
            pair.at_client.put(1, pair.filled(nbytes), WAIT_SECONDS)
            offer = pair.at_server.offer(1, received, WAIT_SECONDS)
        with pytest.raises(MessageSizeMismatch):
            offer.wait(WAIT_SECONDS)
        assert torch.equal(received.tensor, before)
        eventually(lambda: pair.at_server.closed and pair.at_client.closed)

    # Failures of the peer

    def connect_to(self, transport: Transport, peer: PeerProcess, hello: bytes) -> Connection:
        return transport.connect(peer.address, hello, WAIT_SECONDS, secret=SECRET)[0]

    def test_killed_peer_is_lost_within_a_second(
        self, transport: Transport, pool: BufferPool, peer: PeerProcess
    ) -> None:
        connection = self.connect_to(transport, peer, b"")
        ended: list[TransportError | None] = []
        connection.add_closed_callback(ended.append)
        offer = connection.offer(1, pool.acquire(2**20), 30.0)
        put = connection.put(2, pool.acquire(2**20), 30.0)
        time.sleep(0.1)
        peer.kill()
        start = time.monotonic()
        for transfer in (offer, put):
            with pytest.raises(PeerLost):
                transfer.wait(WAIT_SECONDS)
        assert time.monotonic() - start < WAIT_SECONDS / 2
        eventually(lambda: len(ended) == 1)
        assert isinstance(ended[0], self.loss_of_a_killed_peer)
        assert connection.closed

    @pytest.mark.parametrize("kind", ["put", "offer"])
    def test_peer_killed_in_the_middle_of_a_message(
        self, transport: Transport, pool: BufferPool, peer: PeerProcess, kind: str
    ) -> None:
        theirs = "offer" if kind == "put" else "put"
        connection = self.connect_to(transport, peer, steps((theirs, 1, LARGE_BYTES)))
        buffer = pool.acquire(LARGE_BYTES)
        buffer.tensor.fill_(1)
        transfer = getattr(connection, kind)(1, buffer, 30.0)
        time.sleep(0.002)
        peer.kill()
        start = time.monotonic()
        with contextlib.suppress(PeerLost):
            # Or it was done before the signal came: both are right.
            transfer.wait(WAIT_SECONDS)
        assert time.monotonic() - start < WAIT_SECONDS / 2
        buffer.release()
        eventually(lambda: pool.stats().in_use_bytes == 0)

    def test_stopped_peer_runs_into_the_deadline(
        self, transport: Transport, pool: BufferPool, peer: PeerProcess
    ) -> None:
        connection = self.connect_to(transport, peer, steps())
        peer.stop()
        start = time.monotonic()
        offer = connection.offer(1, pool.acquire(100), 0.4)
        bystander = connection.put(2, pool.acquire(LARGE_BYTES), 30.0)
        with pytest.raises(TransferTimeout):
            offer.wait(WAIT_SECONDS)
        assert 0.35 < time.monotonic() - start < WAIT_SECONDS / 2
        with pytest.raises(PeerLost):
            bystander.wait(WAIT_SECONDS)
        assert connection.closed

    @pytest.mark.parametrize("kind", ["put", "offer"])
    def test_peer_stopped_in_the_middle_never_touches_the_buffer_again(
        self, transport: Transport, pool: BufferPool, peer: PeerProcess, kind: str
    ) -> None:
        theirs = "offer" if kind == "put" else "put"
        connection = self.connect_to(transport, peer, steps((theirs, 1, LARGE_BYTES)))
        time.sleep(0.1)
        buffer = pool.acquire(LARGE_BYTES)
        buffer.tensor.fill_(0)
        transfer = getattr(connection, kind)(1, buffer, 0.5)
        time.sleep(0.001)
        peer.stop()
        try:
            transfer.wait(WAIT_SECONDS)
        except TransferTimeout:
            buffer.release()
            if self.stops_transfers:
                eventually(lambda: pool.stats().in_use_bytes == 0)
            reused = pool.acquire(LARGE_BYTES)
            reused.tensor.fill_(FILL + 1)
            peer.resume()
            time.sleep(0.3)
            assert bool((reused.tensor == FILL + 1).all())
            reused.release()
            eventually(lambda: pool.stats().in_use_bytes == 0)

    def test_reconnect_after_a_peer_died_of_which_nothing_was_awaited(
        self, transport: Transport, pool: BufferPool, peer: PeerProcess
    ) -> None:
        connection = self.connect_to(transport, peer, b"")
        ended: list[TransportError | None] = []
        connection.add_closed_callback(ended.append)
        peer.kill()
        eventually(lambda: connection.closed and len(ended) == 1)
        assert isinstance(ended[0], self.loss_of_a_killed_peer)
        for begin in (connection.offer, connection.put):
            with pytest.raises(PeerLost):
                begin(1, pool.acquire(1), WAIT_SECONDS).wait(1.0)
        with running_peer(self.peer_factory) as second:
            again = self.connect_to(transport, second, steps(("put", 1, 2**20)))
            received = pool.acquire(2**20)
            again.offer(1, received, WAIT_SECONDS).wait(WAIT_SECONDS)
            assert bool((received.tensor == FILL).all())

    # Signs of life

    def test_peer_that_answers_a_ping_keeps_its_connection(self, pair: Pair) -> None:
        for asking in (pair.at_client, pair.at_client, pair.at_server):
            before = time.monotonic()
            asking.ping(0.5)
            eventually(lambda asking=asking, at=before: asking.last_heard > at)  # type: ignore[misc]
        time.sleep(0.6)
        assert not pair.at_client.closed
        received = pair.pool.acquire(10)
        pair.at_client.put(1, pair.filled(10), WAIT_SECONDS)
        pair.at_server.offer(1, received, WAIT_SECONDS).wait(WAIT_SECONDS)

    def test_stopped_peer_does_not_answer_and_is_lost(
        self, transport: Transport, pool: BufferPool, peer: PeerProcess
    ) -> None:
        connection = self.connect_to(transport, peer, steps())
        offer = connection.offer(1, pool.acquire(100), 30.0)
        peer.stop()
        start = time.monotonic()
        connection.ping(0.5)
        with pytest.raises(PeerLost):
            offer.wait(WAIT_SECONDS)
        assert 0.4 < time.monotonic() - start < WAIT_SECONDS / 2
        assert connection.closed

    def test_peer_that_stopped_for_a_moment_is_kept(
        self, transport: Transport, pool: BufferPool, peer: PeerProcess
    ) -> None:
        connection = self.connect_to(transport, peer, steps(("put", 1, 100)))
        peer.stop()
        connection.ping(2.0)
        time.sleep(0.5)
        peer.resume()
        time.sleep(2.0)
        assert not connection.closed
        connection.offer(1, pool.acquire(100), WAIT_SECONDS).wait(WAIT_SECONDS)

    def test_message_under_way_gives_a_ping_more_time(
        self, transport: Transport, pool: BufferPool, peer: PeerProcess
    ) -> None:
        """The peer takes the large message late; the ping behind it is answered later still."""
        connection = self.connect_to(transport, peer, steps(("offer", 1, LARGE_BYTES)))
        time.sleep(0.1)
        peer.stop()
        put = connection.put(1, pool.acquire(LARGE_BYTES), 30.0)
        time.sleep(0.05)
        connection.ping(0.2)
        time.sleep(1.0)
        peer.resume()
        put.wait(WAIT_SECONDS)
        assert not connection.closed

    def test_ping_and_skip_of_a_closed_connection_do_nothing(self, pair: Pair) -> None:
        pair.at_client.close()
        pair.at_client.ping(0.1)
        pair.at_client.skip(5)
        eventually(lambda: pair.at_server.closed)

    # Connecting

    def test_nobody_listens(self, transport: Transport) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            address = Address("127.0.0.1", unused.getsockname()[1])
        start = time.monotonic()
        with pytest.raises(ConnectFailed) as failed:
            transport.connect(address, b"", 5.0, secret=SECRET)
        assert failed.value.peer == str(address)
        assert time.monotonic() - start < 5.0 + WAIT_SECONDS

    def test_host_does_not_resolve(self, transport: Transport) -> None:
        with pytest.raises(ConnectFailed):
            transport.connect(Address("no-such-host.invalid", 1), b"", 5.0, secret=SECRET)

    def test_connect_to_a_stopped_peer_times_out(
        self, transport: Transport, peer: PeerProcess
    ) -> None:
        peer.stop()
        start = time.monotonic()
        with pytest.raises(ConnectFailed):
            transport.connect(peer.address, b"", 0.5, secret=SECRET)
        assert time.monotonic() - start < WAIT_SECONDS / 2

    def test_refused_hello_carries_the_reason(
        self, transport: Transport, server: Transport
    ) -> None:
        def accept(hello: bytes, connection: Connection) -> bytes:
            raise ClaimRefused("job 'other' is not ours", code=7)

        address = server.listen("127.0.0.1", 0, proven(accept))
        with pytest.raises(HandshakeRejected) as refused:
            transport.connect(address, b"", WAIT_SECONDS, secret=SECRET)
        assert refused.value.code == 7
        assert refused.value.reason.endswith("job 'other' is not ours")

    def test_faulty_accept_refuses_and_the_listener_lives(
        self, transport: Transport, server: Transport
    ) -> None:
        def accept(hello: bytes, connection: Connection) -> bytes:
            if hello == b"first":
                raise KeyError("a bug")
            return b"fine"

        address = server.listen("127.0.0.1", 0, proven(accept))
        with pytest.raises(HandshakeRejected):
            transport.connect(address, b"first", WAIT_SECONDS, secret=SECRET)
        assert transport.connect(address, b"second", WAIT_SECONDS, secret=SECRET)[1] == b"fine"

    @pytest.mark.parametrize("nbytes", [0, MAX_HELLO_BYTES])
    def test_hello_and_answer_of_any_allowed_length(
        self, transport: Transport, server: Transport, nbytes: int
    ) -> None:
        address = server.listen("127.0.0.1", 0, proven(lambda hello, connection: hello))
        hello = bytes(pattern(nbytes, 1).tolist())
        assert transport.connect(address, hello, WAIT_SECONDS, secret=SECRET)[1] == hello

    def test_port_in_use(self, transport: Transport) -> None:
        with socket.socket() as taken:
            taken.bind(("0.0.0.0", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(TransportError) as refused:
                transport.listen("127.0.0.1", port, proven())
            assert refused.value.peer == f"127.0.0.1:{port}"

    def test_host_of_another_machine(self, transport: Transport) -> None:
        with pytest.raises(TransportError) as refused:
            transport.listen("192.0.2.1", 0, proven())
        assert refused.value.peer == "192.0.2.1:0"

    def test_listener_survives_strangers(self, pair: Pair) -> None:
        """Port scanners, HTTP clients and noise on the port."""
        noise = random.Random(3).randbytes(20_000)
        for payload in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(4096), b"\xff" * 4096, noise):
            with socket.create_connection(("127.0.0.1", pair.address.port)) as stranger:
                stranger.sendall(payload)
                time.sleep(0.02)
        _, answer = pair.client.connect(pair.address, b"friend", WAIT_SECONDS, secret=SECRET)
        assert answer == b"welcome friend"

    # Closing

    def test_close_ends_pending_transfers(self, pair: Pair) -> None:
        ended: list[TransportError | None] = []
        lost: list[TransportError | None] = []
        pair.at_client.add_closed_callback(ended.append)
        pair.at_server.add_closed_callback(lost.append)
        offer = pair.at_client.offer(1, pair.pool.acquire(100), WAIT_SECONDS)
        put = pair.at_client.put(2, pair.pool.acquire(2**20), WAIT_SECONDS)
        time.sleep(0.02)
        pair.at_client.close("enough")
        for transfer in (offer, put):
            with pytest.raises(TransportClosed):
                transfer.wait(1.0)
        eventually(lambda: len(ended) == len(lost) == 1)
        assert ended == [None]
        assert isinstance(lost[0], PeerLost)
        pair.at_client.close()
        with pytest.raises(TransportClosed):
            pair.at_client.put(3, pair.pool.acquire(1), 1.0).wait(1.0)

    @pytest.mark.parametrize("finished", [False, True])
    def test_the_peer_is_told_why_a_connection_closed(self, pair: Pair, finished: bool) -> None:
        offer = pair.at_server.offer(1, pair.pool.acquire(100), WAIT_SECONDS)
        pair.at_client.close("no memory for the scores", finished=finished)
        with pytest.raises(PeerClosed) as told:
            offer.wait(WAIT_SECONDS)
        assert told.value.said == "no memory for the scores"
        assert told.value.finished is finished

    def test_closed_callback_added_late(self, pair: Pair) -> None:
        pair.at_client.close()
        eventually(lambda: pair.at_server.closed)
        late: list[TransportError | None] = []
        pair.at_server.add_closed_callback(late.append)
        eventually(lambda: len(late) == 1)
        assert isinstance(late[0], PeerLost)

    def test_transport_closes_with_transfers_pending(self, pair: Pair) -> None:
        offer = pair.at_client.offer(1, pair.pool.acquire(100), 60.0)
        start = time.monotonic()
        pair.client.close()
        pair.client.close()
        assert time.monotonic() - start < WAIT_SECONDS / 2
        with pytest.raises(TransportClosed):
            offer.wait(1.0)
        with pytest.raises(TransportClosed):
            pair.client.connect(pair.address, b"", 1.0, secret=SECRET)
        eventually(lambda: pair.at_server.closed)

    def test_transport_closes_beside_a_stopped_peer(
        self, pool: BufferPool, peer: PeerProcess
    ) -> None:
        transport = self.make_transport()
        connection = self.connect_to(transport, peer, b"")
        peer.stop()
        put = connection.put(1, pool.acquire(LARGE_BYTES), 60.0)
        time.sleep(0.05)
        start = time.monotonic()
        transport.close()
        assert time.monotonic() - start < WAIT_SECONDS / 2
        with pytest.raises(TransportClosed):
            put.wait(1.0)
        eventually(lambda: pool.stats().idle_bytes == 0)

    # Cost and measurement

    def test_idle_connection_costs_no_cpu(self, pair: Pair) -> None:
        """Trainers need the cores: a polling thread would show as 100%."""
        time.sleep(0.2)
        process = psutil.Process()
        before = process.cpu_times()
        time.sleep(1.5)
        after = process.cpu_times()
        used = after.user - before.user + after.system - before.system
        assert used / 1.5 < 0.10

    def test_probe(self, pair: Pair) -> None:
        result = pair.client.probe(pair.at_client, 2**20, 10, WAIT_SECONDS)
        assert (result.nbytes, result.transport) == (2**20, pair.client.name)
        assert result.peer == pair.at_client.peer
        # How fast depends on what else runs: it ended within the deadline, and no link is faster.
        assert 10 * 2**20 / WAIT_SECONDS / 1e9 < result.gigabytes_per_second < 1000
        assert 0 < result.round_trip_seconds < WAIT_SECONDS
        received = pair.pool.acquire(10)
        pair.at_client.put(1, pair.filled(10), WAIT_SECONDS)
        pair.at_server.offer(1, received, WAIT_SECONDS).wait(WAIT_SECONDS)

    def test_probe_cannot_make_the_peer_hold_much_memory(self, pair: Pair) -> None:
        with pytest.raises(TransportError):
            pair.client.probe(pair.at_client, 2**40, 1, WAIT_SECONDS)
        assert not pair.at_client.closed

    def test_probe_of_a_stopped_peer(self, transport: Transport, peer: PeerProcess) -> None:
        connection = self.connect_to(transport, peer, b"")
        peer.stop()
        with pytest.raises(TransferTimeout):
            transport.probe(connection, 1000, 1, 0.3)
