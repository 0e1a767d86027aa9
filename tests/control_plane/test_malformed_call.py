"""A call that grpc.aio cannot take ends its server; the control plane goes on with all it knows."""

from __future__ import annotations

import socket
import time

import pytest

from distca.contract.rpc_errors import RpcError
from tests.control_plane.service_harness import client_of, eventually, running
from tests.http2 import headers, preface

_DEADLINE_SECONDS = 20.0


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
            line.sendall(preface() + headers(path))
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
