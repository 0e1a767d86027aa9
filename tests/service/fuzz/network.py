"""The same through real sockets: a gRPC channel, and UCX. Far fewer inputs, as each costs far more.

Whatever comes before our code (HTTP/2 in gRPC, the wire protocol in UCX) gets its share of garbage
too: a port that is open is open to everything.
"""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import grpc

from data_plane.greeting import HEADER_BYTES, MAX_BODY_BYTES, BadGreeting, decode_header
from data_plane.transport import Address, TransportError
from data_plane.ucxx.settings import UcxxSettings
from data_plane.ucxx.transport import UcxxTransport
from distca.contract.tokens import JOB_TOKEN_KEY, rank_token
from tests.service.data_plane.test_ucxx_handshake import MAGIC, RawClient, greeting
from tests.service.fuzz.codec import N_RANKS
from tests.service.fuzz.control_plane import BUGS, REQUESTS, template
from tests.service.fuzz.mutation import mutated_bytes, mutated_raw, random_bytes
from tests.service.fuzz.ticks import KEY, Served
from tests.support.service_harness import client_of, job_spec, rank_manifest, running

CALL_SECONDS = 10.0
"""A call that takes longer is a hang."""


class Known:
    """What requests over a channel may name."""

    def __init__(self) -> None:
        self.jobs, self.leases = ["", "nobody"], [""]
        self.tokens: list[bytes | None] = [None, b"", b"no token"]


class ChannelTarget:
    """A control plane behind a real gRPC server."""

    name = "channel"
    share = 0.005
    batch = 500

    @contextmanager
    def fresh(self) -> Iterator[Callable[[random.Random], str]]:
        with (
            running() as control_plane,
            client_of(control_plane.address) as client,
            # Without interceptors: statuses as the network brings them.
            grpc.insecure_channel(control_plane.address) as channel,
        ):
            known = Known()
            job, lease = client.open(0)
            known.jobs.append(job)
            known.leases.append(lease)

            def case(rng: random.Random) -> str:
                if rng.random() < 0.05:
                    return _garbage_bytes(control_plane.address, rng)
                return _raw_call(channel, known, rng)

            yield case
            client.register("good-server")  # whatever servers the cases have registered
            ranks = [client.open(rank, job_spec("honest")) for rank in range(2)]
            watcher = client.watch_rank(*ranks[0])
            watcher.next("job_opened")
            for rank, (job, lease) in enumerate(ranks):
                client.submit(job, lease, rank_manifest(0, rank))
            assert watcher.next("step_planned").plan.manifest.step == 0
            watcher.cancel()


def _raw_call(channel: grpc.Channel, known: Known, rng: random.Random) -> str:
    unary = [method for method in REQUESTS if "Watch" not in method]
    method = rng.choice([*unary, "/distca.v1.Jobs/Nothing"])
    raw = (
        mutated_raw(template(method, known, rng), rng) if method in REQUESTS else random_bytes(rng)
    )
    token = rng.choice(known.tokens)
    metadata = () if token is None else ((JOB_TOKEN_KEY, token),)
    status = grpc.StatusCode.OK
    try:
        channel.unary_unary(method)(raw, timeout=CALL_SECONDS, metadata=metadata)
    except grpc.RpcError as error:
        status = error.code()
    assert status not in BUGS | {grpc.StatusCode.DEADLINE_EXCEEDED}, f"{method}: {status}"
    return str(status.name.lower())


def _garbage_bytes(address: str, rng: random.Random) -> str:
    """Bytes that are no HTTP/2, or only begin like it."""
    host, _, port = address.rpartition(":")
    beginning = rng.choice((b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"))
    _send_garbage(host, int(port), beginning + random_bytes(rng, 2000))
    return "garbage"


def _send_garbage(host: str, port: int, raw: bytes) -> None:
    address = (host, port)
    with socket.create_connection(address, timeout=CALL_SECONDS) as line, suppress(OSError):
        line.sendall(raw)


class GreetingTarget:
    """The header of the data plane's first message."""

    name = "greeting"
    share = 0.02
    batch = 10_000

    @contextmanager
    def fresh(self) -> Iterator[Callable[[random.Random], str]]:
        yield _header


def _header(rng: random.Random) -> str:
    raw = struct.pack("!8sII", MAGIC, rng.randrange(6), 40)
    raw = mutated_bytes(raw, rng)[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
    try:
        header = decode_header(raw)
    except BadGreeting:
        return "refused"
    assert raw.startswith(MAGIC)
    assert header.body_bytes <= MAX_BODY_BYTES
    return "accepted"


class UcxTarget:
    """A tick server behind a real UCX listener."""

    name = "ucx"
    share = 0.0003
    batch = 50

    @contextmanager
    def fresh(self) -> Iterator[Callable[[random.Random], str]]:
        served = Served()
        transport = UcxxTransport(UcxxSettings(handshake_timeout_seconds=0.5))
        address = transport.listen("127.0.0.1", 0, served.server.accept)
        try:
            yield lambda rng: _ucx_case(served, transport, address, rng)
            _connects(served, transport, address)
            served.check_still_serves()
        finally:
            transport.close()
            served.server.close()
            served.executor.close()


def _ucx_case(
    served: Served, transport: UcxxTransport, address: Address, rng: random.Random
) -> str:
    choice = rng.random()
    if choice < 0.3:
        _send_garbage(address.host, address.port, random_bytes(rng, 2000))
        return "garbage"
    rank = rng.randrange(N_RANKS)
    hello = served.hello("attacked", rank, epoch=0)
    raw = mutated_raw(hello, rng)
    if choice < 0.6:
        client = RawClient(address)
        proven = bytes(64) + b"\0\0" + raw
        client.send(mutated_bytes(greeting(1, proven), rng) or b"\0")
        return "raw greeting"
    try:
        connection, _ = transport.connect(address, raw, 5.0, secret=rank_token(KEY, rank))
    except (TransportError, ValueError):
        return "refused"
    buffer = served.pool.acquire(rng.randrange(70_000))
    connection.put(rng.randrange(2**31), buffer, 1.0)
    buffer.release()
    connection.close()
    return "message"


def _connects(served: Served, transport: UcxxTransport, address: Address) -> None:
    """An honest rank gets in after all of that."""
    served.server.close_job("attacked", "fuzz")
    served.open_attacked_job()
    began = time.monotonic()
    hello = served.hello("attacked", 0, epoch=0).SerializeToString()
    connection, _ = transport.connect(address, hello, 5.0, secret=rank_token(KEY, 0))
    assert time.monotonic() - began < 5.0
    connection.close()
