"""Certificates: this side's files, and the handshake with the control plane."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from distca.apps.certs.authority import CertificateError
from distca.apps.certs.description import CertificateDescription, describe_file
from distca.apps.doctor.endpoint import try_control_plane
from distca.apps.doctor.finding import CheckFinding, failed, passed, warned
from distca.apps.doctor.surroundings import Surroundings
from distca.contract.addresses import split_address
from distca.contract.identity import Role
from distca.contract.rpc import RpcSettings
from distca.contract.tls import Certificates, MismatchError

_RENEWED_AT = 0.2
"""Share of a certificate's life: with less left, whatever renews it should have done so."""

_MAKE = "make new ones: 'distca certs make' for development, cert-manager in a cluster"


def check_certificates(around: Surroundings) -> Iterable[CheckFinding]:
    """Are they good, ours, and accepted?"""
    if around.cluster is None:
        return
    settings = around.cluster.settings
    if settings.ca_file is None:
        yield warned(
            "none given: calls to the control plane are plaintext, and everyone may make them",
            "turn on mTLS: --tls-ca, --tls-certificate and --tls-key (docs/security.md)",
        )
        return
    findings = list(_check_files(settings, datetime.now(UTC)))
    yield from findings
    if not any(finding.advice for finding in findings):
        yield from _check_handshake(settings)


def _check_files(settings: RpcSettings, now: datetime) -> Iterator[CheckFinding]:
    try:
        Certificates.read(
            authority=settings.ca_file, certificate=settings.certificate_file, key=settings.key_file
        )
        for path in (settings.ca_file, settings.certificate_file):
            if path is not None:
                for described in describe_file(path):
                    yield judge_validity(path, described, now)
    except (OSError, MismatchError, CertificateError) as error:
        yield failed(str(error), _MAKE)
        return
    if settings.ca_file is not None and settings.certificate_file is not None:
        yield _check_own(settings.ca_file, settings.certificate_file)


def judge_validity(path: Path, described: CertificateDescription, now: datetime) -> CheckFinding:
    """Judges a certificate of file ``path`` at ``now`` by the time that it has left."""
    says = f"{path}: {described.validity(now)}"
    left, life = described.ends - now, described.ends - described.begins
    figures = {"days_left": left / timedelta(days=1)}
    if now < described.begins:
        advice = "set this machine's clock, or wait"
        return failed(says, advice, **figures)
    if left <= timedelta(0):
        return failed(says, _MAKE, **figures)
    if left < _RENEWED_AT * life:
        return warned(says, "it should have been renewed: see what renews it", **figures)
    return passed(says, **figures)


def _check_own(ca_file: Path, certificate_file: Path) -> CheckFinding:
    """Is the certificate the authority's, and does it name a role?"""
    chain = x509.load_pem_x509_certificates(certificate_file.read_bytes())
    authorities = x509.load_pem_x509_certificates(ca_file.read_bytes())
    if not _is_signed(chain, authorities):
        return failed(
            f"{certificate_file} is not signed by an authority in {ca_file}",
            "use a certificate and an authority that belong together",
        )
    identity = describe_file(certificate_file)[0].identity
    if identity is None:
        return failed(
            f"{certificate_file} names no role",
            "its subject alternative names need one URI spiffe://distca/ROLE/NAME; roles are "
            + ", ".join(Role),
        )
    return passed(f"{certificate_file} is {identity.role} {identity.name}")


def _is_signed(chain: list[x509.Certificate], authorities: list[x509.Certificate]) -> bool:
    """Tests whether each certificate is signed by the next, and the last by an authority."""
    if not all(_signs(issuer, certificate) for certificate, issuer in pairwise(chain)):
        return False
    return any(_signs(authority, chain[-1]) for authority in authorities)


def _signs(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_handshake(settings: RpcSettings) -> Iterator[CheckFinding]:
    """Does the control plane show a certificate that we accept, and accept ours? gRPC itself says
    little about it."""
    host, port = split_address("address", settings.addresses[0])
    name = settings.server_name or host
    context = ssl.create_default_context(cafile=str(settings.ca_file))
    context.set_alpn_protocols(["h2"])
    if settings.certificate_file is not None:
        context.load_cert_chain(settings.certificate_file, settings.key_file)
    try:
        with (
            socket.create_connection((host, port), settings.connect_seconds) as raw,
            context.wrap_socket(raw, server_hostname=name) as connection,
        ):
            del connection
    except ssl.SSLCertVerificationError as error:
        yield failed(
            f"the control plane's is refused: {error.verify_message}",
            f"it must be signed by an authority in {settings.ca_file} and be good for {name}; if "
            "it has another name, give that with --tls-server-name",
        )
        return
    except ssl.SSLError as error:
        found = try_control_plane(settings)
        yield failed(
            f"no TLS with the control plane: {found.says or error}",
            found.advice or "does it accept certificates of this authority?",
        )
        return
    except OSError:
        # Nobody listens: check control-plane tells that.
        return
    yield passed(f"the control plane's is good for {name}")
    found = try_control_plane(settings)
    if found.says:
        yield failed(f"the control plane: {found.says}", found.advice)
