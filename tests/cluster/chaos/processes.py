"""A whole job of real processes: a control plane, attention nodes and trainers, on any hosts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from core_attention.shape import AttentionShape, format_shape
from distca.apps.report.step_log import StepLog
from distca.run_folder import RunFolder
from tests import ROOT
from tests.cluster.chaos.hosts import LOOPBACK, Host
from tests.cluster.chaos.tick_log import TickReader
from tests.support.addresses import unused_port
from tests.support.cluster import keep_profile

START_SECONDS = 200.0
"""Until a process serves: importing torch in several at once takes long on a busy machine."""

END_SECONDS = 30.0
CONTROL_PLANE, STANDBY = "control-plane", "standby"
SHAPE = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=8, head_dim_v=8, dtype="float32")


@dataclass
class Process:
    """A child process and its log."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    ready: Path | None = None

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    @property
    def serving(self) -> bool:
        """Whether it has written its addresses."""
        return self.ready is not None and self.ready.exists()

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        """Ends it as ``kill -9`` does."""
        self.popen.kill()
        self.popen.wait(10)

    def tail(self, n_bytes: int = 6000) -> str:
        return f"--- {self.name}\n" + self.log.read_text(errors="replace")[-n_bytes:]


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """What the job does.

    Attributes:
        steps: of training.
        n_trainers, n_nodes: processes.
        layers, tokens_per_rank: size of a step.
        seed: of data and weights.
        planner: by name; the random one spreads documents over all servers and needs no compiling.
        planning_seconds: that the random planner takes for each plan.
        more: further options of ``distca train``.
    """

    steps: int = 200
    n_trainers: int = 2
    n_nodes: int = 4
    layers: int = 2
    tokens_per_rank: int = 256
    seed: int = 3
    planner: str = "random"
    planning_seconds: float = 0.0
    more: tuple[str, ...] = ()


@dataclass
class Job:
    """The processes of one run.

    Args:
        folder: for logs, state and the run.
        settings: what the job does.
        hosts: by process name (``control-plane``, ``node-0``, ``trainer-0``, ...); others run on
            the loopback host.
        environ: further environment variables, by process name.
        run_dir: of the trainers' run, if not in ``folder``.
        mutual_tls: the control plane asks everybody for a certificate.
        standby: a second control plane, :data:`STANDBY`, waits for the lock of the first.
    """

    folder: Path
    settings: JobSettings
    hosts: Mapping[str, Host] = field(default_factory=dict)
    environ: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    run_dir: Path | None = None
    mutual_tls: bool = False
    standby: bool = False
    processes: dict[str, Process] = field(default_factory=dict)
    ended: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        keep_profile(self.folder, SHAPE)
        self._ports = {name: unused_port() for name in self.control_planes}
        if self.mutual_tls:
            _make_certificates(self.folder)
        self.ticks = [
            TickReader(self.folder / f"trainer-{rank}.ticks")
            for rank in range(self.settings.n_trainers)
        ]

    def __enter__(self) -> Job:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts everything, each once those that it needs serve."""
        for name in self.control_planes:
            self.start_control_plane(name)
        nodes = [self.start_node(index) for index in range(self.settings.n_nodes)]
        for node in nodes:
            self.wait_until_serving(node.name)
        for rank in range(self.settings.n_trainers):
            self.start_trainer(rank)

    @property
    def control_planes(self) -> tuple[str, ...]:
        """The one that leads first comes first."""
        return (CONTROL_PLANE, STANDBY) if self.standby else (CONTROL_PLANE,)

    def start_control_plane(
        self, name: str = CONTROL_PLANE, *, wait: bool = True, die_publishing: int = 0
    ) -> Process:
        """A control plane, always at the same address and with the same state; ``die_publishing``
        as in :mod:`tests.cluster.chaos.control_plane_process`."""
        address_file = self._address_file(name)
        chosen: dict[str, object] = {
            "listen": self._listen_address(name),
            "address_file": str(address_file),
            "state_dir": str(self.folder / "state"),
            "planner": self.settings.planner,
            "planning_seconds": self.settings.planning_seconds,
            "die_publishing": die_publishing,
        }
        if self.standby:
            chosen["leader_lock"] = str(self.folder / "leader.lock")
        if self.mutual_tls:
            chosen["certificates"] = str(self.folder)
        command = [
            sys.executable,
            "-m",
            "tests.cluster.chaos.control_plane_process",
            json.dumps(chosen),
        ]
        process = self._spawn(name, command, address_file)
        if wait:
            self.wait_until_serving(name)
        return process

    def start_node(self, index: int) -> Process:
        """A pool server; returns at once."""
        name = f"node-{index}"
        host, address_file = self.host(name), self._address_file(name)
        return self._spawn(
            name,
            [
                *_DISTCA, "--log-level=info", "attention-node",
                f"--control-plane={self.control_plane_address}",
                *self._tls("server"),
                f"--server-id={name}",
                f"--shape={format_shape(SHAPE)}",
                f"--data-host={host.address}",
                *(["--one-host"] if host.alone else []),
                f"--profile-dir={self.folder}",
                f"--address-file={address_file}",
            ],
            address_file,
        )  # fmt: skip

    def start_trainer(self, rank: int, *more: str) -> Process:
        """A trainer, with ``more`` options; returns at once."""
        name, settings = f"trainer-{rank}", self.settings
        host = self.host(name)
        ticks = self.folder / f"{name}.ticks"
        return self._spawn(
            name,
            [
                sys.executable, "-m", "tests.cluster.chaos.trainer_process", str(ticks),
                "--log-level=info", "train",
                f"--control-plane={self.control_plane_address}",
                *self._tls("trainer"),
                f"--data-host={host.address}",
                *(["--one-host"] if host.alone else []),
                f"--run-dir={self.run_folder}",
                f"--rendezvous=file://{self.folder / 'rendezvous'}",
                f"--steps={settings.steps}",
                f"--layers={settings.layers}",
                f"--hidden-size={SHAPE.num_heads * SHAPE.head_dim}",
                f"--heads={SHAPE.num_heads}", f"--kv-heads={SHAPE.num_heads_kv}",
                f"--tokens-per-rank={settings.tokens_per_rank}",
                "--min-forward-tokens=16", "--min-backward-tokens=16",
                f"--seed={settings.seed}", "--learning-rate=3e-4",
                *settings.more,
                *more,
            ],
            environ={
                "RANK": str(rank),
                "WORLD_SIZE": str(settings.n_trainers),
                "GLOO_SOCKET_IFNAME": host.card,
            },
        )  # fmt: skip

    @property
    def run_folder(self) -> Path:
        return self.run_dir or self.folder / "run"

    @property
    def control_plane_address(self) -> str:
        """Of all control planes, with commas between."""
        return ",".join(map(self._listen_address, self.control_planes))

    @property
    def trainers(self) -> list[Process]:
        return [self.processes[f"trainer-{rank}"] for rank in range(self.settings.n_trainers)]

    @property
    def nodes(self) -> list[Process]:
        """The nodes that live."""
        return [
            process
            for name, process in sorted(self.processes.items())
            if name.startswith("node-") and process.alive
        ]

    def host(self, name: str) -> Host:
        """Where a process runs."""
        return self.hosts.get(name, LOOPBACK)

    def addresses(self, name: str) -> dict[str, str]:
        """What a process has written of its addresses."""
        return dict(json.loads(self._address_file(name).read_text()))

    def wait_until_serving(self, name: str, seconds: float = START_SECONDS) -> None:
        """Waits until a process has written its addresses."""
        process, deadline = self.processes[name], time.monotonic() + seconds
        while not process.serving:
            if not process.alive or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start:\n{process.tail()}")
            time.sleep(0.02)

    @property
    def steps_begun(self) -> int:
        """The step that rank 0 is in; -1 before the first tick. After a restart its ticks count
        from 0 again, and its step log goes on."""
        self.ticks[0].read()
        ticks = self.ticks[0].events
        steps = StepLog(RunFolder(self.run_folder).step_log).read()
        return max(ticks[-1].step if ticks else -1, steps[-1].step + 1 if steps else -1)

    @property
    def training(self) -> bool:
        """Whether a trainer still runs; raises if one has failed."""
        codes = [trainer.popen.poll() for trainer in self.trainers]
        if any(codes):
            raise AssertionError(f"trainers ended with {codes}\n{self.tails()}")
        return None in codes

    def tails(self) -> str:
        """The last lines of every log."""
        return "\n".join(process.tail() for process in [*self.processes.values()])

    def close(self) -> None:
        """Ends every process, trainers first; none of its children may be left."""
        running = [process for process in self.processes.values() if process.alive]
        for process in running:
            process.signal(signal.SIGCONT)
        for process in running:
            if process.name.startswith("trainer"):
                process.kill()
        others = [process for process in running if process.alive]
        for process in others:
            process.popen.terminate()
        for process in others:
            try:
                process.popen.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    def left_behind(self) -> list[str]:
        """Command lines of processes that belong to this run and still live."""
        mine = str(self.folder)
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if mine in command and process.pid != os.getpid() and "pytest" not in command:
                    found.append(command)
        return found

    def _spawn(
        self,
        name: str,
        command: list[str],
        ready: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Process:
        if ready is not None:
            ready.unlink(missing_ok=True)
        log = self.folder / f"{name}.log"
        with log.open("ab") as output:
            popen = subprocess.Popen(
                [*self.host(name).prefix, *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONUNBUFFERED": "1",
                    "COLUMNS": "200",
                    **(environ or {}),
                    **self.environ.get(name, {}),
                },
            )
        process = Process(name, popen, log, ready)
        if name in self.processes:
            self.ended.append(self.processes[name])
        self.processes[name] = process
        return process

    def _listen_address(self, name: str) -> str:
        return f"{self.host(name).address}:{self._ports[name]}"

    def _tls(self, role: str) -> list[str]:
        """Options of a client that shows a certificate of ``role``."""
        if not self.mutual_tls:
            return []
        return [
            f"--tls-ca={self.folder / 'ca.crt'}",
            f"--tls-certificate={self.folder / role}.crt",
            f"--tls-key={self.folder / role}.key",
            # On any host: the certificates are good for that name.
            "--tls-server-name=localhost",
        ]

    def _address_file(self, name: str) -> Path:
        return self.folder / f"{name}.address"


_DISTCA = (sys.executable, "-c", "from distca.cli import main; main()")


def _make_certificates(folder: Path) -> None:
    """An authority, and a certificate of each role, good on the loopback host."""
    command = [*_DISTCA, "certs", "make", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=START_SECONDS)
