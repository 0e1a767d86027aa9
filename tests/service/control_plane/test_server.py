"""The process: its ports, its files, its end, and TLS."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane import server
from control_plane.server import ControlPlane
from control_plane.settings import (
    AccessSettings,
    ControlPlaneSettings,
    CoordinatorSettings,
)
from core_attention.whole_file import write_whole
from tests import ROOT
from tests.support.programs import RUN_SECONDS, ran_python
from tests.support.service_harness import (
    client_of,
    rotating_plan,
    running,
)
from tests.support.waiting import DEADLINE_SECONDS, eventually

PROGRAM = """
import logging, sys
from pathlib import Path
from control_plane.server import run
from control_plane.settings import ControlPlaneSettings, CoordinatorSettings
from tests.support.service_harness import rotating_plan

logging.basicConfig(level=logging.INFO, format="%(message)s")
settings = ControlPlaneSettings(
    listen_address="127.0.0.1:0",
    metrics_address="127.0.0.1:0",
    stop_seconds=1.0,
    coordinator=CoordinatorSettings(default_planner="rotating"),
    address_file=Path(sys.argv[1]),
)
try:
    run(settings, {"rotating": rotating_plan})
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_process_writes_its_addresses_serves_and_ends_well_on_a_signal(
    tmp_path: Path, number: signal.Signals
) -> None:
    address_file = tmp_path / "address.json"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(address_file)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(lambda: address_file.exists() or process.poll() is not None, RUN_SECONDS)
        addresses = json.loads(address_file.read_text())
        with client_of(addresses["grpc"]) as client:
            watcher = client.watch_server(client.register("s0"))
            url = f"http://{addresses['metrics']}/metrics"
            with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as answer:
                assert b"distca_control_plane_jobs" in answer.read()
            process.send_signal(number)
            # On a busy machine the stream may be cut off by the end of stop_seconds (CANCELLED).
            ended = watcher.end()
            assert ended is not None
            assert ended.reason.is_transient
        stdout, stderr = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == (130 if number == signal.SIGINT else 0)
    assert stdout == ""
    listening = f"listening on {addresses['grpc']}, metrics on {addresses['metrics']}"
    assert stderr.splitlines().count(listening) == 1
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("name", "before"), [("listen_address", "build_server"), ("metrics_address", "MetricsEndpoint")]
)
def test_a_process_without_free_files_says_so(name: str, before: str) -> None:
    """As one that is started under a small `ulimit -n`."""
    code = f"""
import os, resource
from control_plane import server
from tests.service.control_plane.test_server import start
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
make = server.{before}
def exhausted(*arguments, **named):
    made = make(*arguments, **named) if {before!r} == "build_server" else None
    try:
        while True:
            os.open("/dev/null", os.O_RDONLY)
    except OSError:
        return made or make(*arguments, **named)
server.{before} = exhausted
try:
    start(metrics_address="127.0.0.1:0")
except OSError as error:
    print(type(error).__name__, error.field, error.errno)
"""
    done = ran_python(code, errors="replace")
    assert done.stdout.split() == ["ListenError", name, str(errno.EMFILE)], done.stderr


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602])
def test_a_secret_that_everybody_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    write_whole(path, b"s" * 32, mode=mode)
    with pytest.raises(ValueError, match="everybody"):
        start(access=AccessSettings(token_secret_file=path))
    path.rename(tmp_path / "token-secret")
    with pytest.raises(ValueError, match="everybody"):
        start(state_dir=tmp_path)


def start(**changes: Any) -> None:
    """Starts and stops a control plane; raises what its start raises."""

    async def start_and_stop() -> None:
        settings: dict[str, Any] = {
            "listen_address": "127.0.0.1:0",
            "metrics_address": None,
            "coordinator": CoordinatorSettings(default_planner="rotating"),
        }
        planners = {"rotating": rotating_plan}
        control_plane = ControlPlane(ControlPlaneSettings(**(settings | changes)), planners)
        await control_plane.start()
        await control_plane.stop()

    asyncio.run(start_and_stop())


def test_health_watchers_see_not_serving_before_the_end() -> None:
    with running() as control_plane:
        channel = grpc.insecure_channel(control_plane.address)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    channel.close()


@pytest.mark.parametrize(("stands_by", "ready"), [(False, 200), (True, 503)])
def test_who_stands_by_is_alive_and_not_ready(tmp_path: Path, stands_by: bool, ready: int) -> None:
    with contextlib.ExitStack() as stack:
        access: dict[str, Any] = {"leader_lock": tmp_path / "lock"} if stands_by else {}
        if stands_by:
            stack.enter_context(running(**access))
        here = stack.enter_context(
            running(metrics_address="127.0.0.1:0", stands_by=stands_by, **access)
        )
        assert _status(here, "/livez") == 200
        assert _status(here, "/readyz") == ready


def test_a_loop_that_takes_no_turns_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_ASK_SECONDS", 0.05)
    loop = asyncio.new_event_loop()
    assert not server._goes_on(loop)
    loop.close()
    assert not server._goes_on(loop)


def _status(control_plane: ControlPlane, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://{control_plane.metrics_address}{path}") as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    "wrong",
    [
        {"listen_address": "7700"},
        {"metrics_address": "h:x"},
        {"stop_seconds": -1.0},
        {"max_message_bytes": 0},
        {"leader_lease": "no-namespace"},
        {"leader_lease": "a/b", "leader_lock": Path("f")},
        {"leader_pod": "a"},
        {"coordinator": {"lease_seconds": 0.0}},
        {"coordinator": {"retained_steps": 63}},
        {"coordinator": {"max_pending_steps": 0}},
        {"coordinator": {"max_queued_events": 0}},
        {"coordinator": {"planning_threads": 0}},
        {"coordinator": {"default_planner": "magic"}},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    settings = {"coordinator": {}, **wrong}
    coordinator = {"default_planner": "rotating", **settings.pop("coordinator")}
    with pytest.raises(ValueError):
        start(coordinator=CoordinatorSettings(**coordinator), **settings)
