"""``distca up``: what it starts is found by a file, and started again where it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distca.process.interrupt import INTERRUPTED_EXIT_CODE
from tests import ROOT
from tests.support.programs import ran
from tests.support.waiting import eventually

START_SECONDS = 100.0


@pytest.mark.timeout(300)
def test_what_ends_is_started_again_and_a_signal_ends_all(tmp_path: Path) -> None:
    address_file = tmp_path / "address"
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DISTCA_CONTROL_PLANE": f"file:{address_file}",
    }
    command = [
        *(sys.executable, "-m", "distca", "up", "--nodes=2", "--shape=4:2:16:float32"),
        *("--host=127.0.0.1", f"--address-file={address_file}"),
    ]
    with subprocess.Popen(command, env=env, cwd=tmp_path) as pool:
        try:
            before = servers(env)
            control_plane = json.loads(address_file.read_text())["grpc"]
            for process in ("info control-plane", f"server-id={socket.gethostname()}-0-1"):
                kill_child(pool.pid, process)
                eventually(lambda: len(servers(env)) == 2, START_SECONDS)
            assert {each["server"]["server_id"] for each in servers(env)} == {
                each["server"]["server_id"] for each in before
            }
            assert json.loads(address_file.read_text())["grpc"] == control_plane
        finally:
            pool.terminate()
            assert pool.wait(30) == INTERRUPTED_EXIT_CODE
    assert not address_file.exists()
    assert children(pool.pid, "") == []


def servers(env: dict[str, str]) -> list[dict[str, Any]]:
    """Those that serve, once there are two."""
    asked = ("top", "--once", "--json", "--expect-servers=2", f"--wait-seconds={START_SECONDS:g}")
    shown = ran(sys.executable, "-m", "distca", *asked, env=env, timeout=2 * START_SECONDS)
    assert shown.returncode == 0, shown.stderr
    found: list[dict[str, Any]] = json.loads(shown.stdout)["servers"]
    return [each for each in found if each["seconds_since_heartbeat"] < 15]


def children(parent: int, named: str) -> list[int]:
    return [*map(int, ran("pgrep", "-P", str(parent), "--full", named or ".").stdout.split())]


def kill_child(parent: int, named: str) -> None:
    (child,) = children(parent, named)
    os.kill(child, signal.SIGKILL)
    eventually(lambda: children(parent, named) not in ([], [child]), START_SECONDS)
