"""A call that grpc.aio cannot take ends its server; the control plane goes on with all it knows."""

from __future__ import annotations

import socket
import struct
import time

import pytest

from distca.rpc_errors import RpcError
from tests.control_plane.service_harness import client_of, eventually, running

_DEADLINE_SECONDS = 20.0


def headers_frame(path: bytes) -> bytes:
    """HTTP/2's preface, empty settings, and the headers of a gRPC call of ``path``."""
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    # Literal fields without indexing, with names and values shorter than 127 bytes (RFC 7541).
    block = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in fields.items()
    )
    end_of_headers_on_stream_1 = struct.pack("!BBI", 1, 4, 1)
    settings = b"\0\0\0\4\0\0\0\0\0"
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + settings
        + struct.pack("!I", len(block))[1:]
        + end_of_headers_on_stream_1
        + block
    )


def answers(address: str) -> bool:
    try:
        with client_of(address) as client:
            client.register("node-b")
    except RpcError:
        return False
    return True


@pytest.mark.parametrize("path", [b"/distca.v1.Jobs/\xbf", b"/no.Such/Method"])
def test_a_malformed_call_costs_no_member_its_place(path: bytes) -> None:
    with running() as control_plane:
        with client_of(control_plane.address) as client:
            lease = client.register("node-a")
        host, _, port = control_plane.address.rpartition(":")
        with socket.create_connection((host, int(port)), _DEADLINE_SECONDS) as line:
            line.sendall(headers_frame(path))
            # Until it was read: the server answers, or goes away.
            line.settimeout(_DEADLINE_SECONDS)
            while line.recv(2**16):
                if path.isascii():
                    break
        began = time.monotonic()
        eventually(lambda: answers(control_plane.address))
        assert time.monotonic() - began < _DEADLINE_SECONDS
        with client_of(control_plane.address) as client:
            client.heartbeat(lease)
