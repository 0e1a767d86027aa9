"""Certificates on disk for tests, and clients and control planes that use them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509

from control_plane.server import ControlPlane
from control_plane.settings import AccessSettings
from distca.apps.certs.authority import Authority
from distca.apps.certs.folder import CertificateFolder
from distca.contract.identity import Identity, Role
from distca.contract.settings import TlsFiles
from tests.support.service_harness import Client, TimedControlPlane, client_of, running
from tests.support.waiting import eventually

HOUR = timedelta(hours=1)
HOSTS = ("localhost", "127.0.0.1")

HANDSHAKE_SECONDS = 0.5
"""A connection that brings no call counts as refused after this, in tests."""


@dataclass(frozen=True)
class Files:
    """A certificate, its key, and the authorities that its owner trusts."""

    ca_file: Path
    certificate_file: Path
    key_file: Path

    def for_client(self) -> dict[str, Any]:
        """As settings of a client."""
        return {
            "ca_file": self.ca_file,
            "certificate_file": self.certificate_file,
            "key_file": self.key_file,
        }

    def for_server(self) -> TlsFiles:
        """As settings of a server that asks for certificates."""
        return TlsFiles(
            certificate_file=self.certificate_file,
            key_file=self.key_file,
            client_ca_file=self.ca_file,
        )


class Pki:
    """An authority and the certificates that it signs, below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._certificates = CertificateFolder(folder, force=True)
        self.authority: Authority = self._certificates.authority(HOUR)
        self.ca_file = folder / "ca.crt"

    def issue(
        self,
        role: Role,
        name: str = "a",
        *,
        file: str = "",
        lifetime: timedelta = HOUR,
        starts_in: timedelta = -HOUR,
    ) -> Files:
        """A certificate; an earlier one of the same file name is replaced."""
        signed = self.authority.issue(
            Identity(role=role, name=name), lifetime=lifetime, names=HOSTS, starts_in=starts_in
        )
        certificate = self._certificates.add(file or f"{role}-{name}", signed)
        return Files(self.ca_file, certificate, certificate.with_suffix(".key"))


class Mounted:
    """A process's certificates in a folder of their own, as Kubernetes mounts them: every file is a
    link into a folder that is swapped as a whole."""

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder, self._numbers = folder, itertools.count()
        folder.mkdir()
        self.files = Files(*(folder / name for name in ("ca.crt", "tls.crt", "tls.key")))
        for path in (self.files.ca_file, self.files.certificate_file, self.files.key_file):
            path.symlink_to(Path("..data") / path.name)
        self.put(files.ca_file.read_bytes(), files)

    def put(self, authorities: bytes, files: Files) -> datetime:
        """Replaces all files at once; returns when the new certificate ends."""
        data = self._folder / f"..{next(self._numbers)}"
        data.mkdir()
        (data / "ca.crt").write_bytes(authorities)
        (data / "tls.crt").write_bytes(files.certificate_file.read_bytes())
        (data / "tls.key").write_bytes(files.key_file.read_bytes())
        link = self._folder / "..data_tmp"
        link.symlink_to(data.name)
        link.replace(self._folder / "..data")
        return ends(self.files.certificate_file)


def ends(certificate: Path) -> datetime:
    return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc


@contextmanager
def control_plane_with(
    tls: TlsFiles | None,
    *,
    coordinator: dict[str, Any] | None = None,
    state_dir: Path | None = None,
    **access: Any,
) -> Iterator[TimedControlPlane]:
    """A control plane that asks for certificates, and sees refusals quickly."""
    # Refusals of connections are counted with the sweep, a tenth of a lease apart.
    leases = {"lease_seconds": 5.0} | (coordinator or {})
    settings = AccessSettings(**({"handshake_seconds": HANDSHAKE_SECONDS} | access))
    with running(
        tls=tls, access=settings, coordinator=leases, state_dir=state_dir
    ) as control_plane:
        yield control_plane


@contextmanager
def secure_client(control_plane: ControlPlane, files: Files, **settings: Any) -> Iterator[Client]:
    """A client that shows a certificate."""
    options: dict[str, Any] = {"call_seconds": 5.0, **files.for_client(), **settings}
    with client_of(control_plane.address, **options) as client:
        yield client


def refused(control_plane: ControlPlane, method: str, reason: str) -> float:
    """How many requests have been refused so."""
    name = "distca_control_plane_requests_refused_total"
    labels = {"method": method, "reason": reason}
    return control_plane.metrics.registry.get_sample_value(name, labels) or 0.0


def refused_soon(control_plane: ControlPlane, method: str, reason: str, count: int) -> None:
    """Waits until ``count`` requests have been refused so, or more: clients try again."""
    eventually(lambda: refused(control_plane, method, reason) >= count)
