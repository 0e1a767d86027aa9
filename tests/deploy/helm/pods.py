"""Runs the containers of rendered manifests as processes of this machine, which stands in for the
cluster: folders for volumes, loopback for pods' addresses and for the names of Services."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests import ROOT
from tests.deploy.helm.chart import Manifest

POD_IP = "127.0.0.1"

_PROGRAMS = {
    "distca": [sys.executable, "-m", "distca"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((POD_IP, 0))
        return int(probe.getsockname()[1])


@dataclass
class Container:
    """One container's process."""

    name: str
    manifest: Manifest
    env: Mapping[str, str]
    popen: subprocess.Popen[bytes]
    log: Path

    def wait(self, timeout_seconds: float) -> int:
        """Its exit code; fails with its log when it does not end."""
        try:
            return self.popen.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end:\n{self.log.read_text()}") from None

    def become_ready(self, timeout_seconds: float) -> None:
        """Waits until its startup probe and then its readiness probe succeed."""
        deadline = time.monotonic() + timeout_seconds
        for probe in ("startupProbe", "readinessProbe"):
            while not self.passes(probe):
                assert self.popen.poll() is None, f"{self.name}:\n{self.log.read_text()}"
                assert time.monotonic() < deadline, f"{self.name}:\n{self.log.read_text()}"
                time.sleep(0.2)

    def passes(self, probe: str) -> bool:
        """Whether the probe succeeds, asked as the kubelet asks."""
        settings = self.manifest[probe]
        asked = settings["httpGet"]
        return _is_well(self._port(asked["port"]), asked["path"])

    def _port(self, port: int | str) -> int:
        named = {each["name"]: each["containerPort"] for each in self.manifest["ports"]}
        return int(named.get(str(port), port))


@dataclass
class Machine:
    """Starts containers and ends them all.

    Attributes:
        folder: where volumes and logs lie.
        replaced: text in arguments and variables, and what stands for it here.
    """

    folder: Path
    replaced: dict[str, str]
    started: list[Container] = field(default_factory=list)

    def start(
        self, manifest: Manifest, *, pod: str, annotations: Mapping[str, str] | None = None
    ) -> Container:
        """Starts a container of the pod called ``pod``."""
        env = self._environment(manifest, pod, annotations or {})
        command = _command(manifest["command"])
        command += [self._expanded(text, env) for text in manifest["args"]]
        name = f"{pod}.{manifest['name']}"
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            popen = subprocess.Popen(
                command, env=env, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
            )
        self.started.append(Container(name, manifest, env, popen, log))
        return self.started[-1]

    def run(self, manifest: Manifest, *, pod: str, timeout_seconds: float) -> str:
        """Runs a container that ends by itself, and must succeed; what it wrote."""
        container = self.start(manifest, pod=pod)
        code = container.wait(timeout_seconds)
        text = container.log.read_text()
        assert code == 0, f"{container.name} ended with {code}:\n{text}"
        return text

    def close(self) -> None:
        """Ends whatever still runs."""
        for container in reversed(self.started):
            if container.popen.poll() is None:
                container.popen.send_signal(signal.SIGKILL)
                container.popen.wait(10)

    def _environment(
        self, manifest: Manifest, pod: str, annotations: Mapping[str, str]
    ) -> dict[str, str]:
        fields = {"metadata.name": pod, "status.podIP": POD_IP}
        fields |= {f"metadata.annotations['{name}']": text for name, text in annotations.items()}
        env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        for variable in manifest["env"]:
            value = variable.get("value")
            if value is None:
                value = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            env[variable["name"]] = self._expanded(value, env)
        return env

    def _expanded(self, text: str, env: Mapping[str, str]) -> str:
        """``$(NAME)`` as the kubelet expands it, then what stands for paths and names here."""
        text = re.sub(r"\$\((\w+)\)", lambda match: env.get(match[1], match[0]), text)
        for before, after in self.replaced.items():
            text = text.replace(before, after)
        return text


def _command(command: list[str]) -> list[str]:
    return [*_PROGRAMS[command[0]], *command[1:]]


def _is_well(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{POD_IP}:{port}{path}", timeout=10.0) as answer:
            return bool(answer.status < 400)
    except OSError:
        return False
