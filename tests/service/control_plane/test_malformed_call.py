"""Calls of methods that nobody serves, and of such whose names are no text, at which grpc.aio's own
loop ends. Who calls is told so, and nobody else notices."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.support.http2 import headers, message, preface
from tests.support.service_harness import client_of, running

_DEADLINE_SECONDS = 20.0
_CALLS = 200
_UNIMPLEMENTED = b"12"


def answer(address: str, path: bytes) -> bytes:
    """What the control plane answers to a call, until its status has come."""
    host, _, port = address.rpartition(":")
    read = b""
    with socket.create_connection((host, int(port)), _DEADLINE_SECONDS) as line:
        line.sendall(preface() + headers(path) + message(b""))
        while b"grpc-status" not in read:
            more = line.recv(2**16)
            assert more, f"the connection ended after {read!r}"
            read += more
    return read


@pytest.mark.parametrize(
    "path", [b"/distca.v1.Jobs/\xbf", b"\xff", b"", b"/no.Such/Method"], ids=ascii
)
def test_a_call_of_an_unknown_method_is_answered(path: bytes) -> None:
    with running() as control_plane:
        _, _, status = answer(control_plane.address, path).partition(b"grpc-status")
        assert _UNIMPLEMENTED in status


def test_malformed_calls_cost_nobody_a_call_or_a_stream() -> None:
    """Many at once, of which some go away unanswered, beside a member's calls."""
    with running() as control_plane, client_of(control_plane.address) as client:
        lease = client.register("node-a")
        host, _, port = control_plane.address.rpartition(":")

        def attack() -> None:
            for number in range(_CALLS):
                if number % 2:
                    answer(control_plane.address, b"/\xbf")
                else:
                    with socket.create_connection((host, int(port)), _DEADLINE_SECONDS) as line:
                        line.sendall(preface() + headers(b"/\xbf"))

        attacker = threading.Thread(target=attack)
        attacker.start()
        while attacker.is_alive():
            client.heartbeat(lease)
        attacker.join()
        client.heartbeat(lease)
