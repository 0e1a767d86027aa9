"""Makes a certificate authority and the certificates that it signs. Pure, but for the clock and the
random keys: files are the business of :mod:`distca.apps.certs.folder`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from distca.contract.identity import Identity, Role
from distca.errors import DistcaError

CLOCK_SKEW = timedelta(minutes=5)
"""Certificates begin so long before now, for machines whose clocks are behind."""


@dataclass(frozen=True, kw_only=True)
class Signed:
    """A certificate and its private key, PEM; the key is secret."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return f"Signed(certificate={self.certificate!r}, key=<secret>)"


class Authority:
    """A certificate authority that signs with an elliptic-curve key (P-256).

    Args:
        certificate, key: its own.
    """

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def make(cls, lifetime: timedelta) -> Authority:
        """A new authority, which signs nothing but end certificates."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "distca development authority")])
        usage = _key_usage(key_cert_sign=True, crl_sign=True)
        builder = (
            _builder(name, name, key, lifetime)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, pem: Signed) -> Authority:
        """The authority whose certificate and key are given.

        Raises:
            DistcaError: they are no PEM, no authority's, do not belong together, or the
                key is no elliptic-curve key without a password.
        """
        try:
            certificate = x509.load_pem_x509_certificate(pem.certificate)
            constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
        except (ValueError, x509.ExtensionNotFound) as error:
            raise DistcaError(f"no certificate authority in PEM: {error}") from error
        try:
            key = load_pem_private_key(pem.key, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise DistcaError(f"no private key in PEM: {error}") from error
        if not constraints.value.ca or not isinstance(key, ec.EllipticCurvePrivateKey):
            raise DistcaError("it is no certificate authority with an EC key")
        if key.public_key() != certificate.public_key():
            raise DistcaError("the private key is another certificate's")
        return cls(certificate, key)

    @property
    def ends(self) -> datetime:
        """Until when its certificate is good, UTC."""
        return self._certificate.not_valid_after_utc

    @property
    def pem(self) -> Signed:
        """Its certificate and key."""
        return _pem(self._certificate, self._key)

    def issue(
        self,
        identity: Identity,
        *,
        lifetime: timedelta,
        names: Iterable[str] = (),
        starts_in: timedelta = -CLOCK_SKEW,
    ) -> Signed:
        """A certificate for ``identity`` and a new key.

        Args:
            identity: stands in it as a URI.
            lifetime: how long it is good.
            names: DNS names and IP addresses under which a control plane is reached.
            starts_in: when it becomes good, from now.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        common_name = f"{identity.role}/{identity.name}"[:64]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if identity.role is Role.CONTROL_PLANE:
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
        alternative = [x509.UniformResourceIdentifier(identity.uri), *map(_general_name, names)]
        builder = (
            _builder(subject, self._certificate.subject, key, lifetime, starts_in)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(alternative), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        return _pem(builder.sign(self._key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    lifetime: timedelta,
    starts_in: timedelta = -CLOCK_SKEW,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + starts_in)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Signed:
    return Signed(
        certificate=certificate.public_bytes(Encoding.PEM),
        key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
