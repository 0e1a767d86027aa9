"""Certificates from files, read again when the files change.

Kubernetes and cert-manager replace them in place, weeks before the old ones end. Servers take the
new ones with the next connection; clients, whose channels cannot change, with a new contact, see
:mod:`distca.contract.rotation`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from distca.contract.settings import TlsFiles

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """The contents of a process's files, PEM.

    Attributes:
        authority: certificates that sign the other side's.
        chain, key: its own certificate, and the private key of it.
    """

    authority: bytes | None = None
    chain: bytes | None = None
    key: bytes | None = field(default=None, repr=False)

    @classmethod
    def read(
        cls, *, authority: Path | None, certificate: Path | None, key: Path | None
    ) -> Certificates:
        """Contents of the files now."""
        read = cls(
            authority=authority.read_bytes() if authority else None,
            chain=certificate.read_bytes() if certificate else None,
            key=key.read_bytes() if key else None,
        )
        if read.authority is not None:
            _certificate_in(read.authority, authority)
        if read.chain is not None and read.key is not None:
            _check_pair(_certificate_in(read.chain, certificate), read.key, key)
        return read


class CertificateFiles:
    """Reads a process's files on request, and finds what has changed.

    Attributes:
        current: what was read last.
    """

    def __init__(
        self, *, authority: Path | None, certificate: Path | None, key: Path | None
    ) -> None:
        self._authority, self._certificate, self._key = authority, certificate, key
        self._failure = ""
        self._refused: list[x509.Certificate] = []
        self.current = self._read()

    def changed(self) -> Certificates | None:
        """The new contents if they are new and fit together, else None. Files that cannot be used
        change nothing and are logged once; any thread may call it."""
        try:
            read = self._read()
        except (OSError, ValueError) as error:
            if str(error) != self._failure:
                self._failure = str(error)
                logger.warning("certificates stay as they are: %s", error)
            return None
        self._failure = ""
        if read == self.current:
            return None
        self.current = read
        logger.info("certificates were read again from %s", self._certificate or self._authority)
        return read

    def _read(self) -> Certificates:
        read = Certificates.read(
            authority=self._authority, certificate=self._certificate, key=self._key
        )
        if read.chain is not None:
            self._warn_if_refused(x509.load_pem_x509_certificates(read.chain))
        return read

    def _warn_if_refused(self, chain: list[x509.Certificate]) -> None:
        """gRPC does not say that nobody accepts this process's own certificate at this time."""
        now = datetime.now(UTC)
        for each in chain:
            if each not in self._refused and not (
                each.not_valid_before_utc <= now < each.not_valid_after_utc
            ):
                self._refused.append(each)
                logger.warning(
                    "certificate %s is good from %s to %s; others refuse it: replace the file, or "
                    "set this machine's clock",
                    self._certificate,
                    each.not_valid_before_utc,
                    each.not_valid_after_utc,
                )


def server_credentials(
    files: TlsFiles, on_connection: Callable[[], None] = lambda: None
) -> grpc.ServerCredentials:
    """Credentials from ``files``; a connection made after they changed uses the new ones.

    Args:
        files: which.
        on_connection: called with each connection before its handshake, on gRPC's threads.
    """
    watched = CertificateFiles(
        authority=files.client_ca_file, certificate=files.certificate_file, key=files.key_file
    )

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        on_connection()
        changed = watched.changed()
        return None if changed is None else _configuration(changed)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(watched.current),
        fetch,
        require_client_authentication=files.client_ca_file is not None,
    )


def _configuration(read: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(read.key, read.chain)], root_certificates=read.authority
    )


def _certificate_in(pem: bytes, path: Path | None) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificates(pem)[0]
    except ValueError as error:
        raise ValueError(f"{path} holds no certificate in PEM: {error}") from error


def _check_pair(certificate: x509.Certificate, pem: bytes, path: Path | None) -> None:
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} holds no private key in PEM that can be read without a password"
        ) from error
    if key.public_key() != certificate.public_key():
        raise ValueError(f"the private key in {path} is another certificate's")
