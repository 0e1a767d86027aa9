"""Hosts on one switch, of which some are members of an encrypted data network, each by the commands
that an operator uses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from core_attention.shape import format_shape
from distca.contract.identity import Role
from distca.wireguard.state import MemberState
from tests.chaos.hosts import Network, why_no_namespaces
from tests.cluster import NODE_SHAPE, START_SECONDS, Process, keep_profile
from tests.preloaded import ROOT
from tests.security.pki import Files, Pki

NETWORK = "10.98.0.0/24"
LEASE_SECONDS = 5.0
WIREGUARD_PORT = 51820
END_SECONDS = 30.0
_PORT = 7700


def why_no_tunnels() -> str | None:
    """Why this machine cannot make networks of namespaces with tunnels, or None if it can."""
    missing = [tool for tool in ("wg", "wireguard-go") if shutil.which(tool) is None]
    return f"{', '.join(missing)} not installed" if missing else why_no_namespaces()


class Tunnelled:
    """A control plane that hands out keys, on the host ``control-plane`` of ``network``.

    Args:
        folder: for state and logs.
        pki: whose certificates all show.
        network: the hosts.
    """

    def __init__(self, folder: Path, pki: Pki, network: Network) -> None:
        self.folder = folder
        self.network = network
        self._pki = pki
        self._processes: list[Process] = []
        keep_profile(folder, NODE_SHAPE)

    def start_control_plane(self) -> Process:
        """The control plane, always with the same state."""
        files = self._pki.issue(Role.CONTROL_PLANE, "cluster")
        return self._start(
            "control-plane",
            "control-plane",
            files,
            "control-plane",
            f"--listen=0.0.0.0:{_PORT}",
            "--metrics-listen=127.0.0.1:0",
            f"--lease-seconds={LEASE_SECONDS}",
            f"--state-dir={self.folder / 'state'}",
            f"--data-network={NETWORK}",
            f"--tls-client-ca={files.ca_file}",
        )

    def join(self, host: str, role: Role, *more: str, tenant: str = "a") -> Process:
        """Makes ``host`` a member, with ``more`` options; the addresses have its ``address``."""
        return self._start(
            f"wireguard-{host}",
            host,
            self._pki.issue(role, tenant, file=f"member-{host}"),
            "wireguard",
            self._control_plane,
            f"--host={self.network.hosts[host].address}",
            f"--interface={self.interface(host)}",
            *more,
        )

    def pretend(self, host: str, address: str, *, to: str, at: str) -> None:
        """``host`` speaks to the member ``to``, whose tunnel is ``at``, as if it had ``address``:
        it knows everything but a private key that the member lets in."""
        interface, prefix = self.interface(host), self.network.hosts[host].prefix
        daemon = subprocess.Popen([*prefix, "wireguard-go", "--foreground", interface])
        self._processes.append(Process(interface, daemon, self.folder))
        deadline = time.monotonic() + END_SECONDS
        while self.run(host, "wg", "show", interface).returncode:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        endpoint = f"{self.network.hosts[to].address}:{WIREGUARD_PORT}"
        peer = f"peer {self.public_key_of(to)} endpoint {endpoint} allowed-ips {at}/32"
        for command in (
            f"wg set {interface} private-key /dev/stdin {peer}",
            f"ip address add {address}/24 dev {interface}",
            f"ip link set {interface} up",
        ):
            done = self.run(host, *command.split(), stdin=MemberState().private_text)
            assert done.returncode == 0, done.stderr

    def start_node(self, host: str, address: str) -> Process:
        """An attention node on ``host``, whose data plane is at ``address``."""
        return self._start(
            "attention-node",
            host,
            self._pki.issue(Role.SERVER, file="attention-node"),
            "attention-node",
            self._control_plane,
            f"--shape={format_shape(NODE_SHAPE)}",
            f"--data-host={address}",
            "--transport=ucxx",
            f"--profile-dir={self.folder}",
        )

    def train(self, host: str, address: str, *more: str) -> subprocess.CompletedProcess[str]:
        """A job of one rank on ``host`` to its end; its losses are compared with those without
        attention nodes."""
        shape = NODE_SHAPE
        files = self._pki.issue(Role.TRAINER, file="train")
        return self.run(
            host,
            *_distca(
                "train",
                self._control_plane,
                f"--data-host={address}",
                "--transport=ucxx",
                f"--run-dir={self.folder / 'run'}",
                f"--rendezvous=file://{self.folder / 'rendezvous'}",
                f"--hidden-size={shape.num_heads * shape.head_dim}",
                f"--heads={shape.num_heads}",
                f"--kv-heads={shape.num_heads_kv}",
                "--layers=1",
                "--tokens-per-rank=256",
                "--verify",
                *more,
            ),
            environ={**_environment(files), "RANK": "0", "WORLD_SIZE": "1"},
            seconds=START_SECONDS,
        )

    def run(
        self,
        host: str,
        *command: str,
        environ: dict[str, str] | None = None,
        seconds: float = END_SECONDS,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """A command on ``host`` to its end."""
        return subprocess.run(
            [*self.network.hosts[host].prefix, *command],
            env=environ,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=seconds,
            input=stdin,
        )

    def interface(self, host: str) -> str:
        """What a host's tunnel is called: of wireguard-go, no two on a machine may have one name,
        network namespaces or not."""
        return f"{self.network.name}{list(self.network.hosts).index(host)}"

    def peers_of(self, host: str) -> dict[str, str]:
        """The public keys that ``host`` lets in, and the addresses that they may send from."""
        lines = self.run(host, "wg", "show", self.interface(host), "allowed-ips").stdout
        return dict(line.split("\t") for line in lines.splitlines())

    def public_key_of(self, host: str) -> str:
        return self.run(host, "wg", "show", self.interface(host), "public-key").stdout.strip()

    def close(self) -> None:
        """Ends everything that was started, the last first."""
        for process in reversed(self._processes):
            if process.popen.poll() is None:
                process.popen.terminate()
                try:
                    process.popen.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
        for host in self.network.hosts:
            # A killed member has left it, and with it wireguard-go.
            self.run(host, "ip", "link", "delete", "dev", self.interface(host))

    @property
    def _control_plane(self) -> str:
        return f"--control-plane={self.network.hosts['control-plane'].address}:{_PORT}"

    def _start(self, name: str, host: str, files: Files, *arguments: str) -> Process:
        address_file, log = self.folder / f"{name}.json", self.folder / f"{name}.log"
        address_file.unlink(missing_ok=True)
        with log.open("ab") as output:
            popen = subprocess.Popen(
                [
                    *self.network.hosts[host].prefix,
                    *_distca(*arguments, f"--address-file={address_file}"),
                ],
                env=_environment(files),
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        process = Process(name, popen, log)
        self._processes.append(process)
        deadline = time.monotonic() + START_SECONDS
        while not address_file.exists():
            if popen.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start:\n{log.read_text()}")
            time.sleep(0.05)
        process.addresses = json.loads(address_file.read_text())
        return process


def _distca(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "distca", "--log-level=info", *arguments]


def _environment(files: Files) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DISTCA_TLS_CA": str(files.ca_file),
        "DISTCA_TLS_CERTIFICATE": str(files.certificate_file),
        "DISTCA_TLS_KEY": str(files.key_file),
        # Certificates of tests name no addresses of namespaces.
        "DISTCA_TLS_SERVER_NAME": "localhost",
    }
