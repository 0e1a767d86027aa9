"""``distca doctor`` tells what listens where the control plane was looked for: real servers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from distca.apps.doctor.endpoint import Speaks, try_control_plane
from distca.apps.doctor.examination import CHECKS
from distca.apps.doctor.finding import CheckFinding, Severity
from distca.contract.identity import Role
from distca.contract.rpc import RpcSettings
from distca.contract.timeouts import default_seconds
from tests.service.distca.test_doctor import around, localhost
from tests.service.security.pki import Files, Pki
from tests.support.addresses import unused_port
from tests.support.service_harness import running

LOOPBACK = "127.0.0.1"
CONNECT_SECONDS = 1.0
"""No call gets through, however long one waits."""


def control_plane_finding(address: str, **settings: Any) -> CheckFinding:
    where = around(address, connect_seconds=CONNECT_SECONDS, **settings)
    (found,) = CHECKS["control-plane"](where)
    assert found.status is Severity.FAIL
    return found


@contextmanager
def saying(greet: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that treats each connection with ``greet`` and then keeps it; its port."""
    with socket.create_server((LOOPBACK, 0)) as server:
        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    link, _ = server.accept()
                except OSError:
                    return
                kept.append(link)
                greet(link)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        for link in kept:
            link.close()


class Web(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def web_server() -> Iterator[int]:
    server = ThreadingHTTPServer((LOOPBACK, 0), Web)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


# What to do about a control plane that is called in the wrong way.


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path / "pki")


@pytest.fixture
def other(tmp_path: Path) -> Files:
    """Those of an operator whose authority nobody trusts."""
    return Pki(tmp_path / "other").issue(Role.OPERATOR)


def test_a_tls_server_called_without_certificates(pki: Pki) -> None:
    alone = replace(pki.issue(Role.CONTROL_PLANE).for_server(), client_ca_file=None)
    with running(tls=alone) as control_plane:
        found = control_plane_finding(localhost(control_plane.address))
    assert found.figures["endpoint"] == "grpc_tls"
    assert "--tls-ca" in found.advice


def test_certificates_that_are_missing_or_refused_on_either_side(pki: Pki, other: Files) -> None:
    own = pki.issue(Role.OPERATOR).for_client()
    with running(tls=pki.issue(Role.CONTROL_PLANE).for_server()) as control_plane:
        address = localhost(control_plane.address)
        missing = control_plane_finding(address, ca_file=pki.ca_file)
        plaintext = control_plane_finding(address)
        others = control_plane_finding(address, **other.for_client() | {"ca_file": pki.ca_file})
        here = [
            control_plane_finding(address, **own, server_name="elsewhere.example"),
            control_plane_finding(address, **other.for_client()),
        ]
    assert missing.figures["endpoint"] == others.figures["endpoint"] == "certificate_wanted"
    assert "none is given" in missing.says
    assert "--tls-certificate" in missing.advice
    assert "--tls-ca" not in missing.advice
    assert "--tls-ca, --tls-certificate and --tls-key" in plaintext.advice
    assert f"refuses the client certificate in {other.certificate_file}" in others.says
    for refused in here:
        assert refused.figures["endpoint"] == "refused"
        assert "--tls-server-name" in refused.advice


def test_a_plaintext_server_called_with_tls(pki: Pki) -> None:
    with running() as control_plane:
        address = localhost(control_plane.address)
        found = control_plane_finding(address, **pki.issue(Role.OPERATOR).for_client())
    assert found.figures["endpoint"] == "grpc"
    assert "without TLS" in found.says


# What is no control plane.


def test_the_metrics_port_of_a_process() -> None:
    registry = CollectorRegistry()
    Gauge("distca_control_plane_servers", "As ours are named.", registry=registry).set(1)
    server, thread = start_http_server(0, LOOPBACK, registry)
    try:
        found = control_plane_finding(f"{LOOPBACK}:{server.server_address[1]}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
    assert found.figures["endpoint"] == "metrics"
    assert "--control-plane" in found.advice


def test_a_web_server() -> None:
    with web_server() as port:
        found = control_plane_finding(f"{LOOPBACK}:{port}")
    assert found.figures["endpoint"] == "other"


def test_a_port_that_accepts_and_says_nothing() -> None:
    begun = time.monotonic()
    with saying(lambda _: None) as port:
        found = try_control_plane(RpcSettings(address=f"{LOOPBACK}:{port}"))
    assert found.speaks is Speaks.OTHER
    # Three attempts, and as much again for a busy machine.
    assert time.monotonic() - begun < 6 * default_seconds("first_words_seconds")


@pytest.mark.parametrize("words", [b"", b"SSH-2.0-OpenSSH_9.9\r\n"])
def test_a_port_that_closes_at_once(words: bytes) -> None:
    def greet(link: socket.socket) -> None:
        link.sendall(words)
        link.close()

    with saying(greet) as port:
        found = try_control_plane(RpcSettings(address=f"{LOOPBACK}:{port}"))
    assert found.speaks is Speaks.OTHER


def test_nobody() -> None:
    found = try_control_plane(RpcSettings(address=f"{LOOPBACK}:{unused_port()}"))
    assert found.speaks is Speaks.NOBODY


def test_a_service_that_speaks_grpc_and_is_no_control_plane() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port(f"{LOOPBACK}:0")
    server.start()
    try:
        found = control_plane_finding(f"{LOOPBACK}:{port}")
    finally:
        server.stop(None).wait(5)
    assert "is no control plane" in found.says
