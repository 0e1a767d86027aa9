"""The metrics of a process over HTTP."""

from __future__ import annotations

import contextlib
import errno
import http.client
import socket
import threading
import urllib.error
import urllib.request

import pytest

from distca import __version__
from distca.machine_errors import ListenError
from distca.process.monitoring import (
    MAX_CONNECTIONS,
    Health,
    MetricsEndpoint,
    process_registry,
)


def read(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return str(answer.read().decode())


def test_an_endpoint_serves_until_it_is_closed() -> None:
    endpoint = MetricsEndpoint("127.0.0.1", 0, process_registry("trainer"))
    port = endpoint.port
    text = read(port)
    assert f'distca_build_info{{role="trainer",version="{__version__}"}} 1.0' in text
    assert "process_resident_memory_bytes" in text
    endpoint.close()
    with pytest.raises(urllib.error.URLError):
        read(port)
    with socket.create_server(("127.0.0.1", port)):
        pass  # the port is free again


@pytest.mark.parametrize(
    ("host", "number"),
    [
        ("127.0.0.1", errno.EADDRINUSE),
        ("nohost.invalid", socket.EAI_NONAME),
        ("cp..svc", socket.EAI_NONAME),
    ],
)
def test_what_cannot_be_listened_on_is_named_with_its_reason(host: str, number: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError) as refused:
            MetricsEndpoint(host, port, process_registry("trainer"))
    assert (refused.value.field, refused.value.errno) == ("metrics_port", number)


def test_registries_of_two_sessions_in_one_process_do_not_meet() -> None:
    first, second = process_registry("trainer"), process_registry("trainer")
    assert first is not second
    assert {family.name for family in first.collect()} == {
        family.name for family in second.collect()
    }


def test_silent_and_slow_connections_keep_nobody_from_scraping() -> None:
    endpoint = MetricsEndpoint("127.0.0.1", 0, process_registry("trainer"))
    before = threading.active_count()
    silent = [
        socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(3 * MAX_CONNECTIONS)
    ]
    try:
        for connection in silent[::2]:
            with contextlib.suppress(OSError):
                connection.sendall(b"GET /met")
        for _ in range(5):
            assert "distca_build_info" in read(endpoint.port)
        assert threading.active_count() - before <= MAX_CONNECTIONS + 1
        # The oldest have lost their places.
        silent[0].settimeout(5.0)
        assert silent[0].recv(1) == b""
    finally:
        for connection in silent:
            connection.close()
        endpoint.close()


@pytest.mark.parametrize(
    "garbage",
    [b"\x00" * 100, b"GET " + b"a" * 100_000 + b"\r\n\r\n", b"\x16\x03\x01" + bytes(600), b"\r\n"],
)
def test_garbage_harms_nothing(garbage: bytes) -> None:
    endpoint = MetricsEndpoint("127.0.0.1", 0, process_registry("trainer"))
    with socket.create_connection(("127.0.0.1", endpoint.port)) as connection:
        connection.settimeout(5.0)
        # It may be closed in the middle.
        with contextlib.suppress(OSError):
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
    assert "distca_build_info" in read(endpoint.port)
    endpoint.close()


@pytest.mark.parametrize(
    ("serves", "is_alive", "live", "ready"),
    [
        (True, True, (200, "alive"), (200, "serving")),
        (False, True, (200, "alive"), (503, "not serving")),
        (False, False, (503, "stuck"), (503, "not serving")),
    ],
)
def test_health_is_told_over_http_beside_the_metrics(
    serves: bool, is_alive: bool, live: tuple[int, str], ready: tuple[int, str]
) -> None:
    health = Health(serves=lambda: serves, is_alive=lambda: is_alive)
    registry = process_registry("trainer")
    endpoint = MetricsEndpoint("127.0.0.1", 0, registry, health=health)
    with contextlib.closing(endpoint):
        assert asked(endpoint.port, "/livez") == live
        assert asked(endpoint.port, "/readyz/") == ready
        assert "distca_build_info" in asked(endpoint.port, "/metrics")[1]
    with contextlib.closing(MetricsEndpoint("127.0.0.1", 0, registry)) as without:
        assert asked(without.port, "/readyz")[0] == 404


def asked(port: int, path: str) -> tuple[int, str]:
    """(status, text) of a page."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode().strip()
