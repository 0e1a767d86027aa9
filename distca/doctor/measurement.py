"""Measures the way to a peer."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from data_plane.greeting import HEADER_BYTES, BadGreeting, decode_header
from data_plane.nixl.link import receive_exactly
from data_plane.transport import Address, HandshakeRejected, ProbeResult, Transport
from data_plane.transport_choice import TransportChoice
from data_plane.transports import open_transport
from distca.doctor.responder import OPEN_SECRET, ResponderSettings
from distca.v1 import data_plane_pb2

_PROBE_BYTES = {"cpu": 8 * 2**20, "cuda": 64 * 2**20}
"""Large enough for full speed, see docs/benchmarks.md; peers answer up to 64 MiB."""

_REPEATS = 12
_LOG_OF_UCX = {"UCX_LOG_FILE": "/dev/stderr"}
"""UCX logs to stdout by default, between whatever else is written there."""

_GREETING_SECONDS = 1.0
_CHILD_START_SECONDS = 60.0
"""It imports PyTorch, on a machine that may be busy."""


class ChildFailed(Exception):
    """The responder in a process of its own did not start; the message ends with what it said."""


@contextmanager
def transport_of(
    name: str | TransportChoice, device: str, *, one_host: bool
) -> Iterator[Transport]:
    """A transport whose buffers are on ``device``."""
    transport = open_transport(name, device=device, one_host=one_host)
    try:
        yield transport
    finally:
        transport.close()


def measure(
    transport: Transport,
    device: str,
    address: Address,
    hello: bytes,
    timeout_seconds: float,
    *,
    secret: bytes = OPEN_SECRET,
) -> ProbeResult:
    """What one connection to ``address`` achieves.

    Args:
        transport, device: whose buffers are measured.
        address: the peer.
        hello, secret: who asks, and what proves it.
        timeout_seconds: for the whole.

    Raises:
        HandshakeRejected: it does not know this hello.
        TransportError: it cannot be reached, or was lost.
    """
    connection, _ = transport.connect(address, hello, timeout_seconds, secret=secret)
    try:
        nbytes = _PROBE_BYTES[device.partition(":")[0]]
        return transport.probe(connection, nbytes, _REPEATS, timeout_seconds)
    finally:
        connection.close("measured")


def measure_retrying(
    transport: Transport,
    device: str,
    address: Address,
    hello: bytes,
    timeout_seconds: float,
    *,
    secret: bytes = OPEN_SECRET,
) -> ProbeResult:
    """As :func:`measure`; a server that does not know the job yet is asked again. Raises as that
    does."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return measure(transport, device, address, hello, timeout_seconds, secret=secret)
        except HandshakeRejected as error:
            unknown = error.code == data_plane_pb2.HELLO_REFUSAL_UNKNOWN
            if not unknown or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def answers_as_nixl(address: Address) -> bool:
    """Whether what listens at ``address`` speaks the greeting of the nixl transport."""
    try:
        with socket.create_connection((address.host, address.port), _GREETING_SECONDS) as link:
            challenge = receive_exactly(link, HEADER_BYTES, time.monotonic() + _GREETING_SECONDS)
        decode_header(challenge)
    except (OSError, BadGreeting):
        return False
    return True


@contextmanager
def child_responder(settings: ResponderSettings) -> Iterator[Address]:
    """A responder in a process of its own, as a peer on this machine is.

    Raises:
        ChildFailed: it did not start.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "distca.doctor.responder", json.dumps(asdict(settings))],
        env=os.environ | _LOG_OF_UCX,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield _address_of(child)
    finally:
        child.kill()
        child.communicate(timeout=10)


def _address_of(child: subprocess.Popen[bytes]) -> Address:
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        ready = selector.select(_CHILD_START_SECONDS)
    line = child.stdout.readline() if ready else b""
    if not line:
        child.kill()
        _, said = child.communicate(timeout=10)
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise ChildFailed(f"a second process with UCX did not start: {last or 'no word from it'}")
    return Address(**json.loads(line))
