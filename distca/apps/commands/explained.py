"""Says what gRPC does not: that this process's own certificate is of no use, or a name unknown."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from distca.contract.addresses import split_address

logger = logging.getLogger(__name__)


@contextmanager
def explained(*, certificate: Path | None, **addresses: str | None) -> Iterator[None]:
    """Warns of certificates that nobody accepts at this time: at once, and again where the block
    fails, since it may run for longer than they are good. Then names that cannot be looked up are
    warned of, too; not before, since they may be new.

    Args:
        certificate: file with the process's own; None if it shows none.
        addresses: by the names of their fields: ``host:port``, or several with commas between.
    """
    told = _refused_certificates(certificate)
    for text in told:
        logger.warning("%s", text)
    try:
        yield
    except Exception:
        for text in (*_refused_certificates(certificate), *_unknown_names(addresses)):
            if text not in told:
                logger.warning("%s", text)
        raise


def _refused_certificates(path: Path | None) -> list[str]:
    from distca.apps.certs.authority import CertificateError
    from distca.apps.certs.description import describe_file

    if path is None:
        return []
    try:
        chain = describe_file(path)
    except (OSError, CertificateError):
        # Who uses the file says that, or reads it again when it is whole.
        return []
    now = datetime.now(UTC)
    return [
        f"certificate {path}: {each.validity(now)}; others refuse it: "
        + ("set this machine's clock, or wait" if now < each.begins else "replace the file")
        for each in chain
        if not each.begins <= now < each.ends
    ]


def _unknown_names(addresses: Mapping[str, str | None]) -> Iterator[str]:
    for field, given in addresses.items():
        for address in given.split(",") if given else ():
            host = address.strip()
            try:
                host, _ = split_address(field, host, any_port=True)
                socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            except (OSError, ValueError) as error:
                # A label that is empty or too long is a UnicodeError, which is a ValueError.
                why = getattr(error, "strerror", None) or error
                yield (
                    f"{field} is {given!r}, and {host!r} cannot be looked up: {why}; correct the "
                    "name, or mend how this machine finds names"
                )
