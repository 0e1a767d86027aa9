"""The command line: fast help, named errors, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from core_attention.schedule import read_csv
from core_attention.schedule_orders import SCHEDULES, zero_bubble
from tests.support import preloaded
from tests.support.programs import ran, ran_python
from tests.support.service_harness import running

COMMANDS = (
    "control-plane",
    "attention-node",
    "train",
    "local",
    "health",
    "doctor",
    "top",
    "certs",
    "profile",
    "plan",
    "schedule",
    "simulate",
)


def distca(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs the real command in a process of its own, on a terminal of a fixed width."""
    environment = {"PATH": "/usr/bin:/bin", "COLUMNS": "120", "HOME": "/nonexistent", **environ}
    return preloaded.run(preloaded.DISTCA, *arguments, environment=environment, timeout=60)


def test_help_lists_every_command_and_loads_nothing_heavy() -> None:
    command = [sys.executable, "-c", preloaded.DISTCA, "--help"]
    shown = ran(*command)
    assert shown.returncode == 0
    assert all(f" {command} " in shown.stdout for command in COMMANDS)
    code = (
        "import sys, distca.cli; heavy = {'torch', 'transformers', 'grpc', 'matplotlib', 'numba',"
        " 'pyarrow', 'ucxx'} & set(sys.modules); sys.exit(', '.join(heavy))"
    )
    loaded = ran_python(code)
    assert loaded.stderr.strip() == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    shown = distca(command, "--help")
    assert shown.returncode == 0
    assert f"Usage: distca {command} " in shown.stdout


def test_a_control_plane_that_leads_is_healthy() -> None:
    with running() as control_plane:
        asked = distca("health", DISTCA_HEALTH_ADDRESS=control_plane.address)
    assert (asked.returncode, asked.stdout) == (0, f"{control_plane.address}: SERVING\n")


def test_version_is_shown() -> None:
    assert distca("--version").stdout == "distca 0.1.0\n"


@pytest.mark.parametrize("level", ["", "warning"])
def test_a_service_says_what_it_does_unless_told_otherwise(level: str) -> None:
    environ = {"DISTCA_LOG_LEVEL": level} if level else {}
    ended = distca(
        "control-plane", "--listen=127.0.0.1:0", "--metrics-listen=256.0.0.1:0", **environ
    )
    assert ("INFO control_plane.server: gRPC on 127.0.0.1:" in ended.stderr) is (not level)


def test_traceback_of_a_named_error_is_logged_at_debug() -> None:
    ended = distca(
        "control-plane",
        "--listen=127.0.0.1:0",
        "--metrics-listen=256.0.0.1:0",
        DISTCA_LOG_LEVEL="debug",
    )
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr


def test_profile_measures_and_saves(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    ended = distca("profile", "--shape=1:1:8:float32", "--quick", f"--output={path}")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(path.read_text())["shape"]["num_heads"] == 1


def test_schedules_are_written_as_they_are_read(tmp_path: Path) -> None:
    shown = distca("schedule", "--name=zero-bubble", "--ranks=3", "--microbatches=5")
    assert shown.returncode == 0
    assert read_csv("zero-bubble", shown.stdout) == SCHEDULES["zero-bubble"](3, 5)
    assert "3 stages on 3 ranks, 5 microbatches, at most 3 of them in flight" in shown.stderr
    path = tmp_path / "order.csv"
    assert distca("schedule", "--ranks=3", "--microbatches=5", f"--output={path}").stdout == ""
    assert path.read_text() == shown.stdout
    few = distca("schedule", "--ranks=3", "--microbatches=5", "--max-deferred=1")
    assert read_csv("zero-bubble", few.stdout) == zero_bubble(3, 5, 1) != zero_bubble(3, 5)
