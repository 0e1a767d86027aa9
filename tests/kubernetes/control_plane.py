"""A real control plane of Kubernetes: etcd, API server, controller manager and scheduler."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from distca.certs.authority import Authority
from distca.contract.identity import Identity, Role
from tests.kubernetes.api import Api
from tests.kubernetes.network import KUBERNETES_ADDRESS, MACHINE_ADDRESS, SERVICE_NETWORK

FOLDER_VARIABLE = "DISTCA_KUBERNETES_BIN"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")

START_SECONDS = 180.0
STOP_SECONDS = 20.0

ADMINISTRATOR = "administrator"
PROXY = "system:kube-proxy"
NODES = ("machine-0", "machine-1")

_GROUPS = {
    ADMINISTRATOR: "system:masters",
    **{f"system:node:{name}": "system:nodes" for name in NODES},
}


def programs() -> dict[str, str]:
    """Paths of the programs: from the folder that the variable names, or else from the PATH.

    Raises:
        FileNotFoundError: naming those that are missing.
    """
    folder = os.environ.get(FOLDER_VARIABLE, "")
    places = os.pathsep.join(filter(None, [folder, os.environ["PATH"]]))
    found = {name: shutil.which(name, path=places) for name in PROGRAMS}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise FileNotFoundError(
            f"{', '.join(missing)} of Kubernetes not found in the folder {folder!r} that "
            f"{FOLDER_VARIABLE} names, nor on the PATH; releases of Kubernetes and etcd bring them"
        )
    return {name: str(path) for name, path in found.items()}


@dataclass
class Cluster:
    """A running control plane.

    Attributes:
        folder: of its state and logs.
        url: of the API server, from the machines.
        authority: path of the certificate that signed the API server's.
        tokens: by user.
    """

    folder: Path
    url: str
    authority: Path
    tokens: dict[str, str]

    def api(self, user: str = ADMINISTRATOR) -> Api:
        """A client of ``user``."""
        return Api(self.url, str(self.authority), self.tokens[user])

    def kubeconfig(self, user: str = ADMINISTRATOR) -> Path:
        """A file by which programs call the API server as ``user``."""
        path = self.folder / f"{user.replace(':', '-')}.kubeconfig"
        server = {"server": self.url, "certificate-authority": str(self.authority)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "tests", "cluster": server}],
            "users": [{"name": user, "user": {"token": self.tokens[user]}}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": user}}],
            "current-context": "tests",
        }
        path.write_text(json.dumps(config))
        return path


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """A control plane that ends with the context.

    Raises:
        FileNotFoundError: its programs are not there.
        RuntimeError: one of them does not serve; with the end of its log.
    """
    paths = programs()
    users = [*_GROUPS, PROXY, "system:kube-controller-manager", "system:kube-scheduler"]
    tokens = {user: secrets.token_hex(16) for user in users}
    cluster = Cluster(folder, f"https://{MACHINE_ADDRESS}:6443", folder / "ca.crt", tokens)
    _write_secrets(cluster)
    controllers = str(cluster.kubeconfig("system:kube-controller-manager"))
    scheduler = str(cluster.kubeconfig("system:kube-scheduler"))
    with ExitStack() as stack:
        for name, arguments in (
            ("etcd", _etcd_arguments(folder)),
            ("kube-apiserver", _api_server_arguments(folder)),
            ("kube-controller-manager", _controller_arguments(folder, controllers)),
            ("kube-scheduler", [*_common_arguments(scheduler), "--secure-port=10259"]),
        ):
            process = stack.enter_context(_running(paths[name], arguments, folder / f"{name}.log"))
            if name == "kube-apiserver":
                _wait_until_it_serves(cluster.api(), process, folder / f"{name}.log")
        yield cluster


def _write_secrets(cluster: Cluster) -> None:
    folder = cluster.folder
    authority = Authority.make(timedelta(days=1))
    identity = Identity(role=Role.CONTROL_PLANE, name="kubernetes")
    names = [MACHINE_ADDRESS, KUBERNETES_ADDRESS, "kubernetes.default.svc"]
    signed = authority.issue(identity, lifetime=timedelta(days=1), names=names)
    cluster.authority.write_bytes(authority.pem.certificate)
    (folder / "server.crt").write_bytes(signed.certificate)
    (folder / "server.key").write_bytes(signed.key)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (folder / "accounts.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    lines = [
        f'{token},{user},{user},"{_GROUPS.get(user, "")}"' for user, token in cluster.tokens.items()
    ]
    (folder / "tokens.csv").write_text("\n".join(lines) + "\n")


def _etcd_arguments(folder: Path) -> list[str]:
    return [
        f"--data-dir={folder / 'etcd'}",
        "--listen-client-urls=http://127.0.0.1:2379",
        "--advertise-client-urls=http://127.0.0.1:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--unsafe-no-fsync",
    ]


def _api_server_arguments(folder: Path) -> list[str]:
    return [
        "--etcd-servers=http://127.0.0.1:2379",
        f"--advertise-address={MACHINE_ADDRESS}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        f"--tls-cert-file={folder / 'server.crt'}",
        f"--tls-private-key-file={folder / 'server.key'}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--anonymous-auth=false",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder / 'accounts.key'}",
        f"--service-account-signing-key-file={folder / 'accounts.key'}",
    ]


def _common_arguments(kubeconfig: str) -> list[str]:
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
    ]


def _controller_arguments(folder: Path, kubeconfig: str) -> list[str]:
    return [
        *_common_arguments(kubeconfig),
        "--secure-port=10257",
        "--use-service-account-credentials",
        f"--root-ca-file={folder / 'ca.crt'}",
        f"--service-account-private-key-file={folder / 'accounts.key'}",
    ]


@contextmanager
def _running(program: str, arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_it_serves(api: Api, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    error: Exception | None
    while True:
        try:
            if api.is_ready():
                return
            error = None
        except Exception as raised:
            # Until it listens, the client raises whatever its HTTP library does.
            error = raised
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(
                f"the API server does not serve; the end of its log:\n{log.read_text()[-4000:]}"
            ) from error
        time.sleep(0.2)
