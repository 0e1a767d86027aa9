"""Certificates for development: what is in them, and how files are treated."""

from __future__ import annotations

import stat
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store

from distca.apps.certs.authority import CLOCK_SKEW, Authority, Signed
from distca.apps.certs.folder import CertificateFolder
from distca.contract.identity import Identity, Role
from distca.errors import DistcaError
from tests.service.distca.test_cli import distca

DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.make(DAY)


def load(signed: Signed) -> x509.Certificate:
    return x509.load_pem_x509_certificate(signed.certificate)


@pytest.mark.parametrize("role", Role)
def test_a_certificate_is_valid_for_what_its_role_does(authority: Authority, role: Role) -> None:
    identity = Identity(role=role, name="a")
    signed = load(authority.issue(identity, lifetime=DAY, names=["localhost"]))
    builder = PolicyBuilder().store(Store([load(authority.pem)]))
    verified = builder.build_client_verifier().verify(signed, [])
    assert verified.subjects is not None
    assert x509.UniformResourceIdentifier(identity.uri) in verified.subjects
    server = builder.build_server_verifier(x509.DNSName("localhost"))
    if role is Role.CONTROL_PLANE:
        server.verify(signed, [])
    else:
        with pytest.raises(x509.verification.VerificationError):
            server.verify(signed, [])


def test_an_authority_comes_back_from_its_files_and_signs(authority: Authority) -> None:
    again = Authority.load(authority.pem)
    signed = load(again.issue(Identity(role=Role.TRAINER, name="a"), lifetime=DAY))
    assert signed.issuer == load(authority.pem).subject
    signed.verify_directly_issued_by(load(authority.pem))


def test_what_cannot_sign_is_refused(authority: Authority) -> None:
    other = Authority.make(DAY)
    trainer = authority.issue(Identity(role=Role.TRAINER, name="a"), lifetime=DAY)
    for wrong in (
        Signed(certificate=b"x", key=b"y"),
        Signed(certificate=authority.pem.certificate, key=b"y"),
        trainer,
        Signed(certificate=authority.pem.certificate, key=other.pem.key),
    ):
        with pytest.raises(DistcaError):
            Authority.load(wrong)


def test_keys_show_in_no_text(authority: Authority) -> None:
    assert "PRIVATE" not in repr(authority.pem)
    assert b"PRIVATE" in authority.pem.key


def test_keys_are_for_their_owner_and_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    folder = CertificateFolder(tmp_path / "certs")
    made = folder.authority(DAY)
    signed = made.issue(Identity(role=Role.TRAINER, name="a"), lifetime=DAY)
    certificate = folder.add("trainer", signed)
    key = certificate.with_suffix(".key")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "certs").stat().st_mode) == 0o700
    with pytest.raises(DistcaError):
        folder.add("trainer", signed)
    key.chmod(0o644)
    CertificateFolder(tmp_path / "certs", force=True).add("trainer", signed)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert folder.authority(DAY).pem.certificate == made.pem.certificate
    assert not [path for path in (tmp_path / "certs").iterdir() if "partial" in path.name]


def test_half_an_authority_is_never_overwritten(tmp_path: Path) -> None:
    folder = CertificateFolder(tmp_path, force=True)
    folder.authority(DAY)
    (tmp_path / "ca.key").unlink()
    with pytest.raises(FileNotFoundError):
        folder.authority(DAY)


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    folder = CertificateFolder(tmp_path)
    with pytest.raises(DistcaError):
        folder.authority(3 * DAY, 4 * DAY)
    assert not list(tmp_path.iterdir())
    folder.authority(3 * DAY, 3 * DAY)
    folder.authority(3 * DAY, 2 * DAY)
    with pytest.raises(DistcaError):
        folder.authority(9 * DAY, 4 * DAY)


def test_the_command_makes_one_for_each_role(tmp_path: Path) -> None:
    made = distca("certs", "make", str(tmp_path / "c"), "--days=3", "--host=cp.example")
    assert made.returncode == 0, made.stderr
    stems = {path.stem for path in (tmp_path / "c").glob("*.crt")}
    assert stems == {"ca", *Role}
    found = x509.load_pem_x509_certificate((tmp_path / "c" / "control-plane.crt").read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "cp.example" in names.get_values_for_type(x509.DNSName)
    assert found.not_valid_after_utc - found.not_valid_before_utc == 3 * DAY + CLOCK_SKEW


def test_the_command_refuses_what_it_should(tmp_path: Path) -> None:
    assert distca("certs", "make", str(tmp_path), "--role=trainer").returncode == 0
    again = distca("certs", "make", str(tmp_path), "--role=trainer")
    assert again.returncode == 1
    assert "DistcaError" in again.stderr
    added = distca("certs", "make", str(tmp_path), "--role=trainer", "--name=team-b")
    assert added.returncode == 0
    assert (tmp_path / "trainer-team-b.key").exists()
    for wrong, why in (
        (["--role=king"], "'king' is not a valid Role"),
        (["--name=a/b"], "name is 'a/b'"),
        (["--days=0"], "days is 0"),
        (["--days=99999999"], "days is 99999999; it must be 1 to 36500"),
    ):
        refused = distca("certs", "make", str(tmp_path / "other"), *wrong)
        assert refused.returncode == 2
        assert why in " ".join(refused.stderr.replace("│", " ").split())
