"""A cluster of real processes on loopback, for tests: a control plane and attention nodes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families

from core_attention.cost_model import CostProfile
from core_attention.kernels.select import select_kernel
from core_attention.profiling import device_name, profile_file_name
from core_attention.shape import AttentionShape, format_shape
from tests.support import preloaded
from tests.support.preloaded import PreloadedProcess

NODE_SHAPE = AttentionShape(
    num_heads=4, num_heads_kv=2, head_dim=16, head_dim_v=16, dtype="float32"
)

START_SECONDS = 200.0
"""The first control plane on a machine compiles its planner, and importing torch in several
processes at once takes many seconds on two busy cores."""

_NODE = """
{prelude}
import sys
from pathlib import Path
from attention_node.server import run
from attention_node.settings import NodeSettings
from core_attention.shape import parse_shape
run(NodeSettings(control_plane={control_plane!r}, server_id={server_id!r}, data_host="127.0.0.1",
    one_host=True, address_file=Path({address_file!r}), profile_dir=Path({profile_dir!r}),
    device={device!r}, profile_shapes=(parse_shape({shape!r}),), **{settings!r}))
"""

_CONTROL_PLANE = """
from pathlib import Path
from control_plane.server import run
from control_plane.settings import ControlPlaneSettings, CoordinatorSettings
from control_plane.planner.planners import PLANNERS
from tests.support import random_planner
run(ControlPlaneSettings(listen_address={listen!r}, metrics_address="127.0.0.1:0",
    address_file=Path({address_file!r}), state_dir=Path({state_dir!r}),
    coordinator=CoordinatorSettings(lease_seconds={lease_seconds!r})),
    planners={{**PLANNERS, "random": random_planner.plan, "steady": random_planner.steady_plan}})
"""


@dataclass
class Process:
    """A child process, its addresses and its log."""

    name: str
    popen: subprocess.Popen[bytes] | PreloadedProcess
    log: Path
    addresses: dict[str, str] = field(default_factory=dict)

    def kill(self) -> None:
        """Ends it as ``kill -9`` does."""
        self.popen.kill()
        self.popen.wait(10)

    def terminate(self, timeout_seconds: float = 20.0) -> int:
        """Asks it to end; returns its exit code."""
        self.popen.terminate()
        return self.popen.wait(timeout_seconds)


def keep_profile(folder: Path, shape: AttentionShape, device: str = "cpu") -> None:
    """Puts a made-up cost profile where servers look for a measured one: measuring takes seconds,
    and tests of results do not depend on it."""
    kernel = select_kernel(torch.device(device))
    name = device_name(torch.device(device))
    path = folder / profile_file_name(name, kernel.name, shape)
    if path.exists():
        return
    grid = np.array([1, 64, 4096])
    seconds = 1e-5 + 1e-9 * grid[:, None] * np.maximum(grid[None, :], grid[:, None])
    CostProfile(
        device=name,
        kernel=kernel.name,
        shape=shape,
        q_tokens=grid,
        kv_tokens=grid,
        forward_seconds=seconds,
        backward_seconds=2 * seconds,
    ).save(path)


def on_this_host(profile_dir: Path) -> dict[str, Any]:
    """Options of a session whose ranks and servers are all on this machine; nothing is probed."""
    return {
        "data_host": "127.0.0.1",
        "one_host": True,
        "profile_dir": profile_dir,
        "probe_bytes": 0,
    }


def home(folder: Path, *shapes: AttentionShape, device: str = "cpu") -> dict[str, str]:
    """The environment of ranks whose home ``folder`` is, with cost profiles for ``shapes``."""
    profiles = folder / ".cache" / "distca"
    profiles.mkdir(parents=True, exist_ok=True)
    for shape in shapes:
        keep_profile(profiles, shape, device)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1", **hidden}


def torchrun(n_ranks: int, *arguments: str) -> list[str]:
    """The command that starts ranks on this machine."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    return [*launcher, f"--nproc-per-node={n_ranks}", *arguments]


class Cluster:
    """Starts processes in ``folder`` and ends them all."""

    def __init__(
        self,
        folder: Path,
        *,
        lease_seconds: float = 15.0,
        device: str = "cpu",
        node_shape: AttentionShape = NODE_SHAPE,
    ) -> None:
        self.folder = folder
        self._device, self._node_shape = device, node_shape
        keep_profile(folder, node_shape, device)
        self.processes: list[Process] = []
        self._lease_seconds = lease_seconds
        self.address = "127.0.0.1:0"
        self.control_plane = self.start_control_plane()
        self.address = self.control_plane.addresses["grpc"]

    def start_control_plane(self) -> Process:
        """The control plane; the one before must have ended, and its address is taken again."""
        self.control_plane = self._start(
            "control-plane",
            _CONTROL_PLANE,
            lease_seconds=self._lease_seconds,
            listen=self.address,
            state_dir=str(self.folder / "state"),
        )
        return self.control_plane

    def start_node(self, server_id: str, *, prelude: str = "", **settings: Any) -> Process:
        """A pool server of this name, once it is registered.

        Args:
            server_id: its name.
            prelude: code that runs first in its process: faults to inject.
            settings: further settings of the node.
        """
        return self.start_nodes([server_id], prelude=prelude, **settings)[0]

    def start_nodes(
        self, server_ids: list[str], *, prelude: str = "", device: str = "", **settings: Any
    ) -> list[Process]:
        """Several pool servers, started side by side; on the cluster's device if none is given."""
        started = [
            self._spawn(
                server_id,
                _NODE,
                control_plane=self.address,
                server_id=server_id,
                profile_dir=str(self.folder),
                device=device or self._device,
                shape=format_shape(self._node_shape),
                settings=settings,
                prelude=prelude,
            )
            for server_id in server_ids
        ]
        return [self._await(process) for process in started]

    def failures_detected(self, cause: str) -> float:
        """How many servers the control plane has counted as failed by ``cause``."""
        return self.metric("distca_control_plane_failures_detected_total", cause=cause)

    def metric(self, name: str, **labels: str) -> float:
        """The value of one of the control plane's metrics; 0 where it has none."""
        url = f"http://{self.control_plane.addresses['metrics']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and sample.labels == labels
        )

    def close(self) -> None:
        """Ends every process that still runs, nodes first."""
        for process in reversed(self.processes):
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGCONT)
                process.popen.terminate()
        for process in reversed(self.processes):
            try:
                process.popen.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self, name: str, code: str, **values: object) -> Process:
        return self._await(self._spawn(name, code, **values))

    def _spawn(self, name: str, code: str, **values: object) -> Process:
        address_file = self.folder / f"{name}.json"
        address_file.unlink(missing_ok=True)
        log = self.folder / f"{name}.log"
        popen = preloaded.start(code.format(address_file=str(address_file), **values), log=log)
        process = Process(name, popen, log)
        self.processes.append(process)
        return process

    def _await(self, process: Process) -> Process:
        address_file = self.folder / f"{process.name}.json"
        deadline = time.monotonic() + START_SECONDS
        while not address_file.exists():
            if process.popen.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"{process.name} did not start:\n{process.log.read_text()}")
            time.sleep(0.05)
        process.addresses = json.loads(address_file.read_text())
        return process


@contextlib.contextmanager
def cluster(folder: Path, n_nodes: int, **options: Any) -> Iterator[Cluster]:
    """A control plane and ``n_nodes`` pool servers, ``node-0`` and up; options of Cluster."""
    running = Cluster(folder, **options)
    try:
        running.start_nodes([f"node-{index}" for index in range(n_nodes)])
        yield running
    finally:
        running.close()
