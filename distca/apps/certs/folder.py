"""A folder of certificates: ``ca.crt`` and ``ca.key``, ``<name>.crt`` and ``<name>.key``."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from core_attention.whole_file import write_whole
from distca.apps.certs.authority import Authority, Signed
from distca.contract.identity import Identity
from distca.errors import DistcaError

AUTHORITY = "ca"


class CertificateFolder:
    """Writes certificates; keys are for their owner's eyes only (mode 0600).

    Args:
        path: the folder; made if it is not there.
        force: replace what is there.
    """

    def __init__(self, path: Path, *, force: bool = False) -> None:
        self._path = path
        self._force = force
        path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def authority(self, lifetime: timedelta, signs_for: timedelta = timedelta(0)) -> Authority:
        """The folder's authority, which is never replaced; a new one if there is none.

        Args:
            lifetime: of a new one.
            signs_for: how long the certificates that it is to sign are good.

        Raises:
            DistcaError: what is there is no authority; the message names the files.
        """
        certificate, key = self._files(AUTHORITY)
        if certificate.exists() or key.exists():
            found = Signed(certificate=certificate.read_bytes(), key=key.read_bytes())
            try:
                authority = Authority.load(found)
            except DistcaError as error:
                raise DistcaError(
                    f"{certificate} and {key}: {error}; put back what was there, or give another "
                    "folder"
                ) from error
            if datetime.now(UTC) + signs_for > authority.ends:
                raise DistcaError(
                    f"the authority {certificate} ends {authority.ends:%Y-%m-%d %H:%M} UTC, before "
                    f"certificates of {signs_for.days} days; give fewer --days, or another folder, "
                    "where a new authority is made"
                )
            return authority
        if signs_for > lifetime:
            raise DistcaError(
                f"the new authority would be good for {lifetime.days} days, its certificates for "
                f"{signs_for.days}; give fewer --days or more --authority-days"
            )
        made = Authority.make(lifetime)
        self._write(AUTHORITY, made.pem)
        return made

    def check_free(self, stems: list[str]) -> None:
        """Raises if a file of one of these names is there, and may not be replaced."""
        if self._force:
            return
        for path in (path for stem in stems for path in self._files(stem)):
            if path.exists():
                raise DistcaError(f"{path} exists; give --force to replace it, or another folder")

    def add(self, stem: str, signed: Signed) -> Path:
        """Writes ``<stem>.crt`` and ``<stem>.key``; returns the first."""
        self.check_free([stem])
        self._write(stem, signed)
        return self._files(stem)[0]

    def _files(self, stem: str) -> tuple[Path, Path]:
        return self._path / f"{stem}.crt", self._path / f"{stem}.key"

    def _write(self, stem: str, signed: Signed) -> None:
        # The key first: who watches the certificate finds its key there.
        certificate, key = self._files(stem)
        write_whole(key, signed.key, mode=0o600)
        write_whole(certificate, signed.certificate, mode=0o644)


def default_stem(identity: Identity, default_name: str) -> str:
    """``trainer`` for the default name, ``trainer-team-b`` for another."""
    return identity.role if identity.name == default_name else f"{identity.role}-{identity.name}"
