"""``distca health`` against real health services."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc

from distca.process.health_service import HealthCheck
from tests.service.distca.test_cli import distca


@pytest.fixture
def service() -> Iterator[tuple[HealthCheck, str]]:
    """A node's health service on a free port: the servicer and its address."""
    servicer = HealthCheck()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait(5)


def test_a_process_that_serves_is_healthy(service: tuple[HealthCheck, str]) -> None:
    servicer, address = service
    servicer.serves = True
    asked = distca("health", f"--address={address}")
    assert (asked.returncode, asked.stdout) == (0, f"{address}: SERVING\n")


def test_a_draining_process_is_not_healthy(service: tuple[HealthCheck, str]) -> None:
    servicer, address = service
    servicer.serves = False
    asked = distca("health", DISTCA_HEALTH_ADDRESS=address)
    assert (asked.returncode, asked.stdout) == (3, f"{address}: NOT_SERVING\n")


def test_a_draining_process_is_alive(service: tuple[HealthCheck, str]) -> None:
    servicer, address = service
    servicer.serves = False
    asked = distca("health", "--alive", f"--address={address}")
    assert (asked.returncode, asked.stdout) == (0, f"{address}: NOT_SERVING\n")


def test_no_answer_is_a_named_error_within_the_timeout() -> None:
    with socket.socket() as silent:  # bound but not listening: connections are refused
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        begun = time.monotonic()
        asked = distca("health", f"--address={address}", "--timeout-seconds=1")
    assert asked.returncode == 1
    assert f"RpcError: connect at {address}: no connection" in asked.stderr
    # It may be an attention node that is asked.
    assert "does a process listen there" in " ".join(asked.stderr.split())
    assert "control plane" not in asked.stderr
    assert "Traceback" not in asked.stderr
    assert time.monotonic() - begun < 15, "one second to wait, the rest is the start of Python"
