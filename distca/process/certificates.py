"""When the certificates of a process begin and end, for Prometheus.

Files are read when they are scraped: who replaces them sees the new dates at once, and a file that
was not replaced is seen to be old.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from cryptography import x509
from prometheus_client import CollectorRegistry

from distca.metric_table import Label, Reading, ReadTable, Table, gauge

OWN: Final = "own"
AUTHORITY: Final = "authority"

_USE = Label("use", (OWN, AUTHORITY))


class CertificateTable(Table):
    """Validity of the files that a process was given."""

    prefix = "distca"

    certificate_not_before_timestamp_seconds = gauge(
        "Unix time from which the certificate in a file is valid.", Label("file"), _USE
    )
    certificate_not_after_timestamp_seconds = gauge(
        "Unix time until which the certificate in a file is valid; of a chain the first to end, of "
        "several authorities the last.",
        Label("file"),
        _USE,
    )


def watch_certificates(
    registry: CollectorRegistry,
    *,
    own: Iterable[Path | None] = (),
    authorities: Iterable[Path | None] = (),
) -> None:
    """Shows the validity of PEM files under ``registry``; None stands for a file that is not used.

    Args:
        registry: of the process.
        own: files with the process's certificate, and those that sign it.
        authorities: files with the certificates that sign the other side's. While an authority is
            replaced they hold the old one and the new one.
    """
    files = [
        *((path, OWN) for path in own if path is not None),
        *((path, AUTHORITY) for path in authorities if path is not None),
    ]

    def read() -> Iterator[Reading]:
        for path, use in files:
            certificate = _first_to_matter(path, use)
            if certificate is None:
                continue
            labels = (str(path), use)
            begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
            table = CertificateTable
            yield table.certificate_not_before_timestamp_seconds, labels, begin.timestamp()
            yield table.certificate_not_after_timestamp_seconds, labels, end.timestamp()

    registry.register(ReadTable(CertificateTable, read))


def _first_to_matter(path: Path, use: str) -> x509.Certificate | None:
    try:
        certificates = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError):
        # Half of the files may be written yet; the process goes on with what it read before.
        return None
    choose = min if use == OWN else max
    return choose(certificates, key=lambda certificate: certificate.not_valid_after_utc)
