"""``distca health`` against real control planes."""

from __future__ import annotations

import socket
import time

from tests.service.distca.test_cli import distca
from tests.support.service_harness import running


def test_a_control_plane_that_leads_serves() -> None:
    with running() as control_plane:
        asked = distca("health", DISTCA_HEALTH_ADDRESS=control_plane.address)
    assert (asked.returncode, asked.stdout) == (0, f"{control_plane.address}: SERVING\n")


def test_no_answer_is_a_named_error_within_the_timeout() -> None:
    with socket.socket() as silent:  # bound but not listening: connections are refused
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        begun = time.monotonic()
        asked = distca("health", f"--address={address}", "--timeout-seconds=1")
    assert asked.returncode == 1
    assert f"RpcError: connect at {address}: no connection" in asked.stderr
    assert "Traceback" not in asked.stderr
    assert time.monotonic() - begun < 15, "one second to wait, the rest is the start of Python"
