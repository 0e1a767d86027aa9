"""``host:port``, as people and members write it."""

from __future__ import annotations


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
