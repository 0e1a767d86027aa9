"""``distca top`` against real control planes, as a process, also on a terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from google.protobuf.json_format import ParseDict
from rich.console import Console

from distca.apps.top.settings import Watch
from distca.apps.top.view import render
from distca.v1 import cluster_pb2, jobs_pb2, membership_pb2
from tests import ROOT
from tests.service.distca.test_cli import distca
from tests.support.service_harness import client_of, job_spec, rank_manifest, running

START_SECONDS = 60.0
"""For a Python process to start on a busy machine."""


def server(**changes: object) -> membership_pb2.ServerStatus:
    """A server of the pool with some load, but for ``changes`` of its fields."""
    status = {
        "server": {
            "server_id": "node-0",
            "host": "host-a",
            "device": "NVIDIA H200",
            "version": "0.1.0",
        },
        "load": {
            "busy_ratio": 0.5,
            "queued_tasks": 3,
            "open_ticks": 2,
            "buffer_bytes": 3 * 2**29,
            "moved_bytes_per_second": 2.5e9,
        },
        "seconds_since_heartbeat": 1.0,
        "in_place_rank": -1,
    }
    for name, value in changes.items():
        parts = (status["server"], status["load"])
        owner = next((part for part in parts if isinstance(part, dict) and name in part), status)
        owner[name] = value
    return ParseDict(status, membership_pb2.ServerStatus())


JOB = cluster_pb2.JobStatus(
    job_id="train-1",
    name="train",
    placement=jobs_pb2.PLACEMENT_POOL,
    tolerance=0.1,
    n_ranks=4,
    n_joined_ranks=3,
    planned_step=9,
    finished_step=7,
    last_step=jobs_pb2.StepStatus(
        step=7,
        step_seconds=2.0,
        wait_seconds=0.1,
        tokens=200_000,
        moved_bytes=3_000_000_000,
        phases=[
            jobs_pb2.PhaseStatus(
                phase="forward",
                home_imbalance=1.5,
                predicted_imbalance=1.02,
                measured_imbalance=1.3,
            ),
            jobs_pb2.PhaseStatus(phase="backward", home_imbalance=1.4, predicted_imbalance=1.01),
        ],
    ),
)


def shown(
    *servers: membership_pb2.ServerStatus,
    jobs: tuple[cluster_pb2.JobStatus, ...] = (),
    away: str = "",
    width: int = 160,
) -> str:
    """What the view looks like on a terminal, a wide one if nothing is said, without colours."""
    answer = cluster_pb2.DescribeClusterResponse(
        version="0.1.0",
        uptime_seconds=7200.0,
        servers=servers,
        jobs=jobs,
        planner_state="compiling",
    )
    console = Console(file=io.StringIO(), width=width)
    console.print(render(answer, "cp:7700", away, 12.0))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_header_sums_up() -> None:
    text = shown(server(), server(server_id="node-1", busy_ratio=0.9, draining=True))
    assert "DistCA 0.1.0 at cp:7700   up 2 h   2 servers (1 draining)   0 jobs   5.00 GB/s" in text
    assert "busy 70% in the mean, 90% at most" in text
    assert "planner is being compiled" in " ".join(text.split())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "serving"),
        ({"draining": True}, "draining"),
        ({"seconds_since_heartbeat": 14.0}, "silent for 14 s"),
        ({"in_place_job_id": "train-1", "in_place_rank": 3}, "in train, rank 3"),
        ({"version": "0.0.9"}, "node-0 (0.0.9)"),
        ({"busy_ratio": 0.61}, "61%"),
        ({"buffer_bytes": 3 * 2**29}, "1.5 GiB"),
        ({"moved_bytes_per_second": 1.25e9}, "1.25"),
    ],
)
def test_a_server_shows_its_state_and_load(changes: dict[str, object], words: str) -> None:
    assert words in shown(server(**changes), jobs=(JOB,))


def test_a_job_shows_progress_speed_and_balance() -> None:
    text = shown(jobs=(JOB,))
    for words in ("3/4", "7 done, 9 planned", "5%", "100,000", "1.50", "forward 1.50 1.02 1.30"):
        assert words in text
    assert "backward 1.40 1.01 -" in text
    on_gpus = cluster_pb2.JobStatus()
    on_gpus.CopyFrom(JOB)
    on_gpus.last_step.ClearField("wait_seconds")
    (line,) = (line for line in shown(jobs=(on_gpus,)).splitlines() if "3/4" in line)
    assert line.split()[-4:] == ["2", "-", "100,000", "1.50"]


def test_eighty_columns_show_whole_names_and_every_number() -> None:
    ids = [f"distca-attention-node-{index}" for index in (0, 1, 12)]
    text = shown(*(server(server_id=name, host=f"gpu-{name}") for name in ids), width=80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    (head,) = (line for line in lines if "buffers" in line)
    begin, end = lines.index(head) + 1, head.index("host")
    names = "".join(line[:end].strip() for line in lines[begin:])
    assert names.startswith("".join(ids))
    assert text.count("1.5 GiB") == text.count("2.50 ") + text.count("2.50\n") == len(ids)


def test_an_empty_cluster_and_old_figures_are_shown() -> None:
    with pytest.raises(ValueError):
        Watch(expect_servers=2)  # it is for --once alone
    text = shown(away="connect at cp:7700: refused")
    assert "No server has joined." in text
    assert "No job is open." in text
    assert "No answer for 12 s, what follows is old" in text


def test_once_shows_servers_and_jobs_as_text_and_json_and_counts_servers() -> None:
    load = membership_pb2.ServerLoad(queued_tasks=41, busy_ratio=0.25)
    with running() as control_plane, client_of(control_plane.address) as client:
        lease = client.register("node-a")
        client.membership.Heartbeat(membership_pb2.HeartbeatRequest(lease_id=lease, load=load))
        job_id, rank_lease = client.open(0, job_spec("train", n_ranks=1))
        client.submit(job_id, rank_lease, rank_manifest(0, 0))
        once = ["top", "--once", f"--control-plane={control_plane.address}"]
        asked = distca(*once, "--expect-servers=1")
        as_json = distca("top", "--once", "--json", DISTCA_CONTROL_PLANE=control_plane.address)
        missing = distca(*once, "--expect-servers=2", "--wait-seconds=1.5")
    assert asked.returncode == 0, asked.stderr
    for words in ("1 server ", "node-a", "25%", "41", "train", "1/1"):
        assert words in asked.stdout
    told = ParseDict(json.loads(as_json.stdout), cluster_pb2.DescribeClusterResponse())
    assert [each.server.server_id for each in told.servers] == ["node-a"]
    assert [(each.name, each.finished_step) for each in told.jobs] == [("train", -1)]
    assert missing.returncode == 1
    assert "DistcaError: 1 of 2 servers" in missing.stderr


class Terminal:
    """A process on a terminal of its own; what it has written so far."""

    def __init__(self, arguments: list[str]) -> None:
        self._master, slave = pty.openpty()
        # Rows and columns: wide enough for whole lines.
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "distca", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env={"PATH": "/usr/bin:/bin", "TERM": "xterm-256color", "HOME": "/nonexistent"},
        )
        os.close(slave)
        os.set_blocking(self._master, False)
        self._text = ""

    def wait_for(self, words: str) -> None:
        """Waits until ``words`` are written; what came before is forgotten."""
        deadline = time.monotonic() + START_SECONDS
        while words not in self._text:
            assert time.monotonic() < deadline, f"{words!r} never came: {self._text[-2000:]}"
            assert self.process.poll() is None, self._text[-2000:]
            try:
                self._text += os.read(self._master, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.02)
        self._text = ""

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self._master)


@contextmanager
def control_plane_process(listen: str, folder: Path) -> Iterator[str]:
    """A control plane as a process, which can be started again on its port; its address."""
    address_file = folder / "address.json"
    address_file.unlink(missing_ok=True)
    options = [f"--listen={listen}", "--metrics-listen=127.0.0.1:0"]
    options.append(f"--address-file={address_file}")
    process = subprocess.Popen(
        [sys.executable, "-m", "distca", "control-plane", *options],
        cwd=ROOT,
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not address_file.exists():
            assert process.poll() is None, "the control plane ended"
            assert time.monotonic() < deadline, "the control plane did not start"
            time.sleep(0.05)
        yield json.loads(address_file.read_text())["grpc"]
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.timeout(300)
def test_the_live_view_outlives_its_control_plane(tmp_path: Path) -> None:
    with ExitStack() as stack:
        with control_plane_process("127.0.0.1:0", tmp_path) as address:
            follow = ["top", f"--control-plane={address}", "--interval-seconds=0.2"]
            top = stack.enter_context(closing(Terminal(follow)))
            top.wait_for("No server has joined.")
            with client_of(address) as client:
                client.register("node-a")
                top.wait_for("node-a")
        top.wait_for("what follows is old; trying again")
        top.wait_for("node-a")
        with control_plane_process(address, tmp_path):
            top.wait_for("No server has joined.")
        top.process.send_signal(signal.SIGINT)
        assert top.process.wait(10) == 130
