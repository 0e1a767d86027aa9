"""What is particular to the nixl transport: registered memory that comes and goes, and peers whose
frames make no sense."""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import torch
from prometheus_client import CollectorRegistry

from data_plane.buffer_pool import BufferPool
from data_plane.greeting import HEADER_BYTES, Greeting, GreetingKind, decode_header
from data_plane.handshake import ClientHandshake
from data_plane.metrics import DataPlaneMetrics
from data_plane.nixl.connection import NixlConnection
from data_plane.nixl.frame_mac import MAC_BYTES, FrameMac
from data_plane.nixl.link import MAX_FRAME_BYTES
from data_plane.nixl.settings import NixlSettings
from data_plane.nixl.transport import NixlTransport
from data_plane.process_sockets import AcceptedSockets
from data_plane.proof import Ends
from data_plane.transport import Address, Connection, TransportError
from tests.service.data_plane.conformance import listen, pattern
from tests.service.data_plane.secret import SECRET, proven
from tests.service.data_plane.strangers import open_at, strangers
from tests.support.waiting import eventually


@pytest.fixture
def transport() -> Iterator[NixlTransport]:
    transport = NixlTransport(NixlSettings(one_host=True, max_unclaimed_offers=10))
    yield transport
    transport.close()


@pytest.fixture
def peer() -> Iterator[NixlTransport]:
    transport = NixlTransport(NixlSettings(one_host=True))
    yield transport
    transport.close()


@pytest.fixture
def accepted() -> list[Connection]:
    return []


@pytest.fixture
def address(transport: NixlTransport, accepted: list[Connection]) -> Address:
    return listen(transport, accepted)


class Slab:
    """An allocator that hands out the same memory again and again."""

    def __init__(self, nbytes: int) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8)

    def __call__(self, nbytes: int) -> torch.Tensor:
        return self._memory[:nbytes]


def test_memory_that_comes_back_as_another_block_is_never_mixed_up(
    address: Address, accepted: list[Connection], peer: NixlTransport
) -> None:
    """Peers keep the metadata of the blocks before for the same addresses."""
    connection, _ = peer.connect(address, b"", 5.0, secret=SECRET)
    slab, sending = Slab(2**21), BufferPool()
    for number, nbytes in enumerate((2**20, 3 * 2**17, 2**20, 100_000, 2**20 - 1)):
        # A pool of its own for each size: the one before gives its block back.
        received = BufferPool(slab).acquire(nbytes)
        received.tensor.fill_(0)
        sent = sending.acquire(nbytes)
        sent.tensor.copy_(pattern(nbytes, number))
        offer = accepted[0].offer(number, received, 5.0)
        connection.put(number, sent, 5.0).wait(5.0)
        offer.wait(5.0)
        assert torch.equal(received.tensor, pattern(nbytes, number))
        received.release()
        sent.release()


def test_memory_is_registered_once(
    caplog: pytest.LogCaptureFixture,
    address: Address,
    accepted: list[Connection],
    peer: NixlTransport,
) -> None:
    connection, _ = peer.connect(address, b"", 5.0, secret=SECRET)
    pool = BufferPool()
    with caplog.at_level(logging.DEBUG, "data_plane.nixl.agent"):
        for tag in range(10):
            sent, received = pool.acquire(50_000 - tag), pool.acquire(50_000 - tag)
            offer = accepted[0].offer(tag, received, 5.0)
            connection.put(tag, sent, 5.0).wait(5.0)
            offer.wait(5.0)
            sent.release()
            received.release()
    assert sum("registered" in record.message for record in caplog.records) <= 4


def test_too_many_unclaimed_offers_end_the_connection(
    address: Address, accepted: list[Connection], peer: NixlTransport
) -> None:
    connection, _ = peer.connect(address, b"", 5.0, secret=SECRET)
    ended: list[TransportError | None] = []
    accepted[0].add_closed_callback(ended.append)
    pool = BufferPool()
    for tag in range(11):
        connection.offer(tag, pool.acquire(100), 5.0)
    eventually(lambda: len(ended) == 1)
    assert ended[0] is not None
    eventually(lambda: connection.closed)


class Peer:
    """A client that proves itself, and then sends what no transport of ours would."""

    def __init__(self, address: Address) -> None:
        self.link = socket.create_connection((address.host, address.port), 5.0)
        handshake = ClientHandshake(b"", SECRET)
        ends = Ends(client="", server="")
        self.link.sendall(handshake.answer(self._receive(), ends).encode())
        self._keys, _ = handshake.conclude(self._receive(), transport="nixl", peer="test")
        self._sending = FrameMac(self._keys.to_server)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.link.close()

    def send(self, head: bytes, payload: bytes = b"") -> None:
        """Sends a frame with the code that belongs to it."""
        self.link.sendall(head + self._sending.next(head, payload) + payload)

    def _receive(self) -> Greeting:
        header = decode_header(self.link.recv(HEADER_BYTES, socket.MSG_WAITALL))
        return header.with_body(self.link.recv(header.body_bytes, socket.MSG_WAITALL))


def offer_frame(region: int) -> tuple[bytes, bytes]:
    payload = struct.pack("!BQIQQi", 0, 1, region, 4096, 100, 0)
    return struct.pack("!BI", 2, len(payload)), payload


PLACE = struct.pack("!BQ", 0, 1)


@pytest.mark.parametrize(
    ("head", "payload"),
    [
        (struct.pack("!BI", 99, 0), b""),
        (struct.pack("!BI", 1, MAX_FRAME_BYTES + 1), b""),
        (struct.pack("!BI", 2, 3), b"abc"),
        offer_frame(7),
        (struct.pack("!BI", 3, len(PLACE)), PLACE),
        (struct.pack("!BI", 4, len(PLACE)), PLACE),
        (struct.pack("!BI", 6, 1), b"x"),
    ],
    ids=["kind", "length", "short offer", "unknown region", "begin", "done", "short control"],
)
def test_frames_that_make_no_sense_end_the_connection(
    address: Address, accepted: list[Connection], head: bytes, payload: bytes
) -> None:
    with Peer(address) as peer:
        ended: list[TransportError | None] = []
        accepted[0].add_closed_callback(ended.append)
        peer.send(head, payload)
        eventually(lambda: len(ended) == 1)
        assert ended[0] is not None


def test_damaged_metadata_ends_the_connection_not_the_process(
    address: Address, accepted: list[Connection]
) -> None:
    pool = BufferPool()
    with Peer(address) as peer:
        put = accepted[0].put(1, pool.acquire(100), 5.0)
        metadata = struct.pack("!I", 7) + b"not metadata at all!"
        peer.send(struct.pack("!BI", 1, len(metadata)), metadata)
        peer.send(*offer_frame(7))
        with pytest.raises(TransportError):
            put.wait(5.0)
        eventually(lambda: accepted[0].closed)


@pytest.mark.parametrize("forgery", ["made up", "changed", "sent twice", "sent back"])
def test_a_frame_without_the_connections_key_is_not_taken(
    address: Address, accepted: list[Connection], forgery: str
) -> None:
    pool = BufferPool()
    with Peer(address) as peer:
        offer = accepted[0].offer(1, pool.acquire(0), 5.0)
        head, done = struct.pack("!BI", 4, len(PLACE)), PLACE
        ping = struct.pack("!BI", 6, 4), struct.pack("!I", 32)
        if forgery == "made up":
            peer.link.sendall(head + bytes(MAC_BYTES) + done)
        elif forgery == "changed":
            other = struct.pack("!BQ", 0, 2)
            peer.link.sendall(head + FrameMac(peer._keys.to_server).next(head, other) + done)
        elif forgery == "sent twice":
            mac = FrameMac(peer._keys.to_server).next(*ping)
            peer.link.sendall((ping[0] + mac + ping[1]) * 2)
        else:
            peer.link.sendall(head + FrameMac(peer._keys.to_client).next(head, done) + done)
        with pytest.raises(TransportError):
            offer.wait(5.0)


def test_children_do_not_hold_a_link_up(address: Address, peer: NixlTransport) -> None:
    """A forked child would keep the socket open after this process has ended."""
    connection, _ = peer.connect(address, b"", 5.0, secret=SECRET)
    assert isinstance(connection, NixlConnection)
    link = connection.link._socket
    assert link is not None
    child = os.fork()
    if child == 0:
        os._exit(0 if link.fileno() == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert link.fileno() >= 0


@pytest.mark.parametrize(
    ("settings", "tls"),
    [(NixlSettings(), "^sm"), (NixlSettings(one_host=True), None)],
)
def test_shared_memory_is_for_one_host(settings: NixlSettings, tls: str | None) -> None:
    assert settings.context_options({}).get("TLS") == tls
    assert settings.context_options({"UCX_TLS": "rc"}).get("TLS") is None
    options = NixlSettings(options={"UCX_TLS": "tcp"}).context_options({"UCX_TLS": "rc"})
    assert options["TLS"] == "tcp"


def test_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TCP_KEEPCNT", "7")
    before = dict(os.environ)
    NixlTransport(NixlSettings(options={"TCP_KEEPCNT": "5"})).close()
    changed = {name for name in before if os.environ.get(name) != before[name]}
    assert not {name for name in changed | (os.environ.keys() - before.keys()) if "UCX" in name}


def test_a_refused_peer_is_not_listened_to(peer: NixlTransport) -> None:
    """Its frames come right behind its hello, and none of them is looked at."""
    refused: list[Connection] = []

    def accept(hello: bytes, connection: Connection) -> bytes:
        refused.append(connection)
        raise ValueError("not today")

    address = peer.listen("127.0.0.1", 0, proven(accept))
    with socket.create_connection((address.host, address.port), 5.0) as link:
        handshake = ClientHandshake(b"", SECRET)
        challenge = decode_header(link.recv(HEADER_BYTES, socket.MSG_WAITALL))
        nonce = link.recv(challenge.body_bytes, socket.MSG_WAITALL)
        hello = handshake.answer(challenge.with_body(nonce), Ends(client="", server=""))
        metadata = struct.pack("!I", 7) + b"not metadata at all!"
        frame = struct.pack("!BI", 1, len(metadata)) + bytes(MAC_BYTES) + metadata
        link.sendall(hello.encode() + frame)
        answer = decode_header(link.recv(HEADER_BYTES, socket.MSG_WAITALL))
        assert answer.status is GreetingKind.REJECTED
        assert b"not today" in link.recv(answer.body_bytes, socket.MSG_WAITALL)
        (connection,) = refused
        assert isinstance(connection, NixlConnection)
        assert not connection._remote_regions
        assert not connection.greeted


@pytest.mark.parametrize("where", ["listener", "own-port"])
def test_strangers_that_say_no_hello_are_few_and_end(peer: NixlTransport, where: str) -> None:
    registry, limit, count = CollectorRegistry(), 20, 120

    def refused(cause: str) -> float:
        labels = {"transport": "nixl", "cause": cause}
        name = "distca_data_plane_handshakes_refused_total"
        return registry.get_sample_value(name, labels) or 0.0

    settings = NixlSettings(
        one_host=True, data_host="127.0.0.1", handshake_timeout_seconds=2.0, max_half_open=limit
    )
    transport = NixlTransport(settings, DataPlaneMetrics(registry))
    with closing(transport), ExitStack() as stack:
        address = transport.listen("127.0.0.1", 0, proven())
        (own_port,) = transport._worker.memory._ports
        connection, _ = peer.connect(address, b"", 5.0, secret=SECRET)
        port = address.port if where == "listener" else own_port
        # The member, or nixl's agent, which connects to itself.
        eventually(
            lambda: bool(AcceptedSockets().find(lambda a: a.port == port and a.received_bytes > 0))
        )
        assert open_at(port) == 1
        silent = strangers(stack, port, count)
        eventually(lambda: refused("no-room") >= count - limit)
        eventually(lambda: open_at(port) <= 1 + limit)
        peer.connect(address, b"", 5.0, secret=SECRET)[0].close()
        for line in silent:
            line.settimeout(10.0)
            while line.recv(1000):
                pass
        eventually(lambda: open_at(port) <= 1)
        assert refused("no-room") + refused("timeout") == count
        assert open_at(port) == 1
        assert not connection.closed


def test_the_port_of_nixls_own_ucx_is_closed_to_hosts_that_have_proven_nothing() -> None:
    """13 bytes there, of some ids, end the process once rows move."""
    stranger = "127.0.0.9"
    settings = NixlSettings(data_host="127.0.0.1")
    with closing(NixlTransport(settings)) as transport, closing(NixlTransport(settings)) as peer:
        accepted: list[Connection] = []
        address = listen(transport, accepted)
        connection, _ = peer.connect(address, b"", 5.0, secret=SECRET)
        pool = BufferPool()
        for tag, message_id in enumerate((10, 12, 16, 17)):
            for port in transport._ucx_ports | peer._ucx_ports:
                with (
                    pytest.raises(TimeoutError),
                    socket.create_connection(("127.0.0.1", port), 0.3, (stranger, 0)) as line,
                ):
                    line.sendall(struct.pack("<QBI", 0xCAFEBABE12345678, message_id, 0))
            offer = accepted[0].offer(tag, pool.acquire(2**20), 5.0)
            connection.put(tag, pool.acquire(2**20), 5.0)
            offer.wait(5.0)
