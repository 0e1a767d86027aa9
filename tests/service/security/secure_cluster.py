"""A cluster of real processes that speak mTLS, started with the commands that an operator uses."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

from distca.contract.identity import Role
from tests.service.security.pki import Files, Mounted, Pki
from tests.support import preloaded
from tests.support.cluster import NODE_SHAPE, START_SECONDS, Process, keep_profile
from tests.support.preloaded import DISTCA

CHECK_SECONDS = 0.5
"""How often processes look at their certificates."""

_END_SECONDS = 20.0


class SecureCluster:
    """A control plane and one attention node, ``node-0``; certificates are mounted below
    ``folder``.

    Attributes:
        address: of the control plane.
        node: the node's process.
        mounts: certificates by the role of their owner.
    """

    def __init__(self, folder: Path, pki: Pki, *, lease_seconds: float = 5.0) -> None:
        self.folder = folder
        self.mounts = {
            role: Mounted(folder / f"tls-{role}", pki.issue(role, "cluster"))
            for role in (Role.CONTROL_PLANE, Role.SERVER, Role.TRAINER)
        }
        keep_profile(folder, NODE_SHAPE)
        self.processes: list[Process] = []
        try:
            self.address = "127.0.0.1:0"
            self._control_plane = (
                "control-plane",
                "--metrics-listen=127.0.0.1:0",
                f"--lease-seconds={lease_seconds}",
                f"--state-dir={folder / 'state'}",
                f"--tls-client-ca={self.files(Role.CONTROL_PLANE).ca_file}",
            )
            self.address = self._start_control_plane().addresses["grpc"]
            shape = NODE_SHAPE
            self.node = self._start(
                "node-0",
                self.files(Role.SERVER),
                "attention-node",
                f"--control-plane={self.address}",
                f"--shape={shape.num_heads}:{shape.num_heads_kv}:{shape.head_dim}:{shape.dtype}",
                "--server-id=node-0",
                "--data-host=127.0.0.1",
                "--one-host",
                f"--profile-dir={folder}",
            )
        except BaseException:
            self.close()
            raise

    def files(self, role: Role) -> Files:
        """What processes of a role are given."""
        return self.mounts[role].files

    def log(self, name: str) -> str:
        """What a process has logged."""
        return (self.folder / f"{name}.log").read_text()

    def restart_control_plane(self) -> None:
        """Kills the control plane, and starts another one at its address with its state."""
        self.processes.pop(0).kill()
        self._start_control_plane()
        self.processes.insert(0, self.processes.pop())

    def run(self, files: Files | None, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command to its end, with certificates or without."""
        return preloaded.run(DISTCA, *arguments, environment=_environment(files), timeout=60)

    def close(self) -> None:
        """Ends the processes, the node first."""
        for process in reversed(self.processes):
            if process.popen.poll() is None:
                process.popen.terminate()
            try:
                process.popen.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start_control_plane(self) -> Process:
        files, listen = self.files(Role.CONTROL_PLANE), f"--listen={self.address}"
        (self.folder / "control-plane.json").unlink(missing_ok=True)
        return self._start("control-plane", files, *self._control_plane, listen)

    def _start(self, name: str, files: Files, *arguments: str) -> Process:
        address_file, log = self.folder / f"{name}.json", self.folder / f"{name}.log"
        popen = preloaded.start(
            DISTCA,
            "--log-level=info",
            *arguments,
            f"--address-file={address_file}",
            log=log,
            environment=_environment(files),
        )
        process = Process(name, popen, log)
        self.processes.append(process)
        deadline = time.monotonic() + START_SECONDS
        while not address_file.exists():
            if popen.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start:\n{log.read_text()}")
            time.sleep(0.05)
        process.addresses = json.loads(address_file.read_text())
        return process


def _environment(files: Files | None) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if files is not None:
        environment |= {
            "DISTCA_TLS_CA": str(files.ca_file),
            "DISTCA_TLS_CERTIFICATE": str(files.certificate_file),
            "DISTCA_TLS_KEY": str(files.key_file),
            "DISTCA_TLS_CHECK_SECONDS": str(CHECK_SECONDS),
        }
    return environment
