"""Says what gRPC does not: that nobody accepts this process's own certificate at this time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

logger = logging.getLogger(__name__)


@contextmanager
def explained(certificate: Path | None) -> Iterator[None]:
    """Warns of certificates that nobody accepts: at once, and again where the block fails, since it
    may run for longer than they are good.

    Args:
        certificate: file with the process's own; None if it shows none.
    """
    told = _refused_certificates(certificate)
    for text in told:
        logger.warning("%s", text)
    try:
        yield
    except Exception:
        for text in _refused_certificates(certificate):
            if text not in told:
                logger.warning("%s", text)
        raise


def _refused_certificates(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        chain = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError):
        # Who uses the file says that, or reads it again when it is whole.
        return []
    now = datetime.now(UTC)
    return [
        f"certificate {path} is good from {each.not_valid_before_utc:%Y-%m-%d %H:%M} to "
        f"{each.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; others refuse it: replace the file, or "
        "set this machine's clock"
        for each in chain
        if not each.not_valid_before_utc <= now < each.not_valid_after_utc
    ]
