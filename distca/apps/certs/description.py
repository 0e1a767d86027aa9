"""A certificate described in words."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import ExtendedKeyUsageOID

from distca.apps.certs.authority import CertificateError
from distca.contract.identity import Identity, identity_of
from distca.process.amounts import duration_text

_USES = {
    ExtendedKeyUsageOID.CLIENT_AUTH: "client authentication",
    ExtendedKeyUsageOID.SERVER_AUTH: "server authentication",
}

Extension = TypeVar("Extension", bound=x509.ExtensionType)


@dataclass(frozen=True, kw_only=True)
class CertificateDescription:
    """The facts of a certificate that matter here.

    Attributes:
        subject, issuer: distinguished names (RFC 4514).
        identity: role and name; None if it gives none.
        names: DNS names and IP addresses.
        uses: of its key, by their names in X.509.
        authority: it signs others.
        begins, ends: when it is good.
        fingerprint: SHA-256 of its DER form, hexadecimal.
    """

    subject: str
    issuer: str
    identity: Identity | None
    names: tuple[str, ...]
    uses: tuple[str, ...]
    authority: bool
    begins: datetime
    ends: datetime
    fingerprint: str

    def validity(self, now: datetime) -> str:
        """A sentence on its validity at ``now``."""
        if now < self.begins:
            return f"not yet good: begins {self.begins:%Y-%m-%d %H:%M} UTC"
        if now >= self.ends:
            return f"EXPIRED {self.ends:%Y-%m-%d %H:%M} UTC"
        left = duration_text((self.ends - now).total_seconds())
        return f"good until {self.ends:%Y-%m-%d %H:%M} UTC ({left} left)"


def describe_file(path: Path) -> list[CertificateDescription]:
    """The certificates in a PEM file, in order.

    Raises:
        OSError: it cannot be read.
        CertificateError: it holds none.
    """
    try:
        certificates = x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError as error:
        raise CertificateError(f"{path} holds no certificate in PEM") from error
    return [describe(certificate) for certificate in certificates]


def describe(certificate: x509.Certificate) -> CertificateDescription:
    """Describes ``certificate``."""
    alternative = _extension(certificate, x509.SubjectAlternativeName)
    uris, names = [], []
    if alternative is not None:
        uris = alternative.get_values_for_type(x509.UniformResourceIdentifier)
        names = alternative.get_values_for_type(x509.DNSName)
        names += [str(ip) for ip in alternative.get_values_for_type(x509.IPAddress)]
    usage = _extension(certificate, x509.ExtendedKeyUsage)
    constraints = _extension(certificate, x509.BasicConstraints)
    return CertificateDescription(
        subject=certificate.subject.rfc4514_string(),
        issuer=certificate.issuer.rfc4514_string(),
        identity=identity_of(uris),
        names=tuple(names),
        uses=tuple(_USES.get(oid, oid.dotted_string) for oid in usage) if usage is not None else (),
        authority=constraints is not None and constraints.ca,
        begins=certificate.not_valid_before_utc,
        ends=certificate.not_valid_after_utc,
        fingerprint=certificate.fingerprint(hashes.SHA256()).hex(),
    )


def _extension(certificate: x509.Certificate, kind: type[Extension]) -> Extension | None:
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None
