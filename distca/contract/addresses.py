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


def split_addresses(name: str, addresses: str) -> tuple[str, ...]:
    """Each ``host:port`` of ``addresses``, which have commas between."""
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
