"""Host names and IPv4 addresses of peers and of this machine."""

from __future__ import annotations

import socket
import threading

from data_plane.interfaces import ipv4_of
from data_plane.owner_thread import OwnerResult
from data_plane.transport import Address, ConnectFailed, TransportError


def resolve(address: Address, timeout_seconds: float, transport: str) -> str:
    """Returns the IPv4 address of a host name; name servers can take longer than the deadline."""
    result = OwnerResult()

    def look_up() -> None:
        try:
            result.set(ipv4_of(address.host))
        except OSError as error:
            result.set(connect_failed(address, f"host name does not resolve: {error}", transport))

    threading.Thread(target=look_up, name=f"{transport}-resolve", daemon=True).start()
    try:
        ip: str = result.get(timeout_seconds)
    except TimeoutError:
        reason = "host name not resolved before the deadline"
        raise connect_failed(address, reason, transport) from None
    return ip


def local_ip(host: str, port: int, transport: str) -> str:
    """Returns the IPv4 address of ``host``, one of this machine."""
    try:
        ip = ipv4_of(host)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as test:
            test.bind((ip, 0))
    except OSError as error:
        raise TransportError(
            f"cannot listen: {host!r} is no IPv4 address of this machine: {error}",
            transport=transport,
            peer=f"{host}:{port}",
            hint="give one of its addresses, or 0.0.0.0",
        ) from error
    return ip


def connect_failed(address: Address, reason: str, transport: str) -> ConnectFailed:
    """Returns the error for an attempt that led to no connection."""
    return ConnectFailed(
        f"cannot connect: {reason}",
        transport=transport,
        peer=str(address),
        hint="check the address, that the peer listens with the same transport, and that no "
        "firewall is in between",
    )
