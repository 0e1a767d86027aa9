"""``host:port``, as people and members write it, or the file that a control plane writes it to."""

from __future__ import annotations

import json
import time
from pathlib import Path

from distca.contract.timeouts import default_seconds

FILE = "file:"
"""Before the path of a file, as ``--address-file`` of a control plane names it."""

FILE_SECONDS = default_seconds("connect_seconds")
"""How long the file is waited for: jobs start their processes side by side."""

_POLL_SECONDS = 0.1


def split_address(name: str, address: str, *, any_port: bool = False) -> tuple[str, int]:
    """Host, without the brackets of IPv6, and port of ``address``.

    Args:
        name: of the field that it stands in, for the error.
        address: ``host:port``.
        any_port: port 0 is valid: it stands for any free one.

    Raises:
        ValueError: it is something else.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) not in range(0 if any_port else 1, 2**16):
        raise ValueError(f"{name} is {address!r}; it must be host:port, for example localhost:7700")
    return host.removeprefix("[").removesuffix("]"), int(port)


def split_addresses(name: str, addresses: str) -> tuple[str, ...]:
    """Each ``host:port`` of ``addresses``, which have commas between; or what is in the file that
    they name.

    Raises:
        ValueError: they are something else, or the file does not appear within
            :data:`FILE_SECONDS`.
    """
    if addresses.startswith(FILE):
        addresses = _read(name, Path(addresses.removeprefix(FILE)))
    each = tuple(address.strip() for address in addresses.split(","))
    for address in each:
        try:
            split_address(name, address)
        except ValueError as error:
            raise ValueError(f"{error}, or several with commas between") from error
    return each


def hosts_of(name: str, addresses: str) -> list[str]:
    """The hosts of ``addresses``; as :func:`split_addresses`."""
    return [split_address(name, address)[0] for address in split_addresses(name, addresses)]


def _read(name: str, path: Path) -> str:
    deadline = time.monotonic() + FILE_SECONDS
    while not path.is_file():
        if time.monotonic() > deadline:
            raise ValueError(
                f"{name} is {FILE}{path}, and no control plane wrote it in {FILE_SECONDS:g} s; "
                "start one with this --address-file, which all hosts share"
            )
        time.sleep(_POLL_SECONDS)
    try:
        return str(json.loads(path.read_text())["grpc"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{name} is {FILE}{path}, which is no address file ({error}); give the path of a "
            "control plane's --address-file"
        ) from None
