"""The metrics of a process over HTTP."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest

from distca import __version__
from distca.monitoring import MetricsAddressError, MetricsEndpoint, process_registry


def read(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
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


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MetricsAddressError, match=f"127.0.0.1:{port}: .*choose another port"):
            MetricsEndpoint("127.0.0.1", port, process_registry("trainer"))


def test_registries_of_two_sessions_in_one_process_do_not_meet() -> None:
    first, second = process_registry("trainer"), process_registry("trainer")
    assert first is not second
    assert {family.name for family in first.collect()} == {
        family.name for family in second.collect()
    }
