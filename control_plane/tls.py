"""Server credentials that follow their files, so that certificates are renewed without restart."""

from __future__ import annotations

import logging

import grpc

from control_plane.settings import TlsFiles

logger = logging.getLogger(__name__)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials from ``files``; a connection made after they changed uses the new ones.

    Raises:
        OSError: a file cannot be read.
    """
    reloader = _Reloader(files)
    return grpc.dynamic_ssl_server_credentials(
        reloader.configuration,
        reloader.changed,
        require_client_authentication=files.client_ca_file is not None,
    )


class _Reloader:
    """Reads the files again when one of them has another modification time."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._times = self._modification_times()
        self.configuration = self._read()

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration, or None to go on with the last one. gRPC calls it with every
        connection, from its own threads."""
        try:
            times = self._modification_times()
            if times == self._times:
                return None
            configuration = self._read()
        except OSError as error:
            logger.warning("certificates stay as they are: %s", error)
            return None
        self._times = times
        logger.info("certificates were read again from %s", self._files.certificate_file)
        return configuration

    def _modification_times(self) -> list[int]:
        return [path.stat().st_mtime_ns for path in self._files.paths()]

    def _read(self) -> grpc.ServerCertificateConfiguration:
        pair = (self._files.key_file.read_bytes(), self._files.certificate_file.read_bytes())
        authority = self._files.client_ca_file
        return grpc.ssl_server_certificate_configuration(
            [pair], root_certificates=authority.read_bytes() if authority else None
        )
