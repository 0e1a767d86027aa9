"""Network interfaces of this machine, by the addresses that they carry. IPv4, as UCX is used."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

OWN_ADDRESS = "auto"
"""Stands for :func:`own_address`, where settings name the others."""
ANY_ADDRESS = "0.0.0.0"
_LOOPBACK_ADDRESS = "127.0.0.1"
_DISCARD_PORT = 9
"""Nothing is ever sent to it."""


def ipv4_of(host: str) -> str:
    """Returns the IPv4 address that the name of a host stands for.

    Raises:
        OSError: it stands for none, or is no name at all.
    """
    try:
        return socket.gethostbyname(host)
    except UnicodeError as error:
        raise _no_name(error) from error


def addresses_of(host: str, family: socket.AddressFamily = socket.AF_UNSPEC) -> list[str]:
    """Returns all addresses that the name of a host stands for, in order."""
    try:
        found = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
    except UnicodeError as error:
        raise _no_name(error) from error
    return sorted({str(entry[4][0]) for entry in found})


def _no_name(error: UnicodeError) -> socket.gaierror:
    """The error of a name with a part that is empty or too long, which is never looked up."""
    return socket.gaierror(socket.EAI_NONAME, f"not the name of a host: {error}")


def interface_of(ip: str) -> str | None:
    """Returns the name of the interface that carries ``ip``; None if none does.

    All of 127.0.0.0/8 belongs to the loopback interface, though it carries one address of it.
    """
    wanted = _LOOPBACK_ADDRESS if ipaddress.ip_address(ip).is_loopback else ip
    for name, addresses in _addresses().items():
        if any(each.family == socket.AF_INET and each.address == wanted for each in addresses):
            # A second address may go by the name of an alias, such as eth0:1.
            return name.partition(":")[0]
    return None


def address_of_interface(name: str) -> str:
    """Returns the IPv4 address of one of this machine's network interfaces."""
    by_name = {
        each: [one.address for one in addresses if one.family == socket.AF_INET]
        for each, addresses in _addresses().items()
    }
    if by_name.get(name):
        return str(by_name[name][0])
    what = "has no IPv4 address" if name in by_name else "is no network interface of this machine"
    others = ", ".join(f"{each} ({found[0]})" for each, found in by_name.items() if found)
    raise ValueError(f"data_interface {name!r} {what}; choose one of {others or 'none'}")


def own_address(*, towards: Iterable[str] = ()) -> str:
    """Returns the IPv4 address at which other machines reach this one: what its name stands for.

    Where that is a loopback address, as in the ``/etc/hosts`` of Debian and Ubuntu (127.0.1.1), or
    none at all, it is the address from which this machine calls the others.

    Args:
        towards: names or addresses of others, of which the first with a route counts.

    Raises:
        ValueError: the name stands for none, and there is no route; says what to do.
    """
    name, ip, why = socket.gethostname(), None, ""
    try:
        ip = ipv4_of(name)
    except OSError as error:
        why = str(error.strerror)
    if ip is not None and not ipaddress.ip_address(ip).is_loopback:
        return ip
    ip = source_towards(towards) or ip
    if ip is None:
        raise ValueError(
            f"data_host is not given, and this machine's name {name!r} has no IPv4 address: {why}; "
            "give --data-host one that `ip address` shows"
        )
    return ip


class _HasDataHost(Protocol):
    @property
    def data_host(self) -> str: ...


def take_own_address(settings: _HasDataHost, *, towards: Iterable[str]) -> None:
    """Makes ``data_host`` of ``settings``, where it is :data:`OWN_ADDRESS`, what that stands for;
    raises as :func:`own_address`."""
    if settings.data_host == OWN_ADDRESS:
        object.__setattr__(settings, "data_host", own_address(towards=towards))


def own_addresses() -> set[str]:
    """Returns the IPv4 addresses that this machine's interfaces carry."""
    return {
        str(each.address)
        for addresses in _addresses().values()
        for each in addresses
        if each.family == socket.AF_INET
    }


def is_private(ip: str) -> bool:
    """Returns whether only this machine, or holders of a WireGuard key, can reach ``ip``, an
    address of this machine."""
    if ipaddress.ip_address(ip).is_loopback:
        return True
    try:
        about = Path(f"/sys/class/net/{interface_of(ip)}/uevent").read_text()
    except OSError:
        return False
    return "DEVTYPE=wireguard" in about.splitlines()


def rows_host(data_host: str, data_interface: str) -> str:
    """Returns the address at which rows are exchanged: that of ``data_interface`` where one is
    named, else ``data_host``.
    """
    return address_of_interface(data_interface) if data_interface else data_host


def source_ip(peer_ip: str) -> str | None:
    """Returns the address from which this machine would call ``peer_ip``; None without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as test:
        try:
            test.connect((peer_ip, _DISCARD_PORT))
        except OSError:
            return None
        return str(test.getsockname()[0])


def source_towards(hosts: Iterable[str]) -> str | None:
    """Returns the address from which this machine would call the first of ``hosts``, names or
    addresses, that resolves and has a route; None if none does."""
    for host in hosts:
        try:
            source = source_ip(ipv4_of(host))
        except OSError:
            continue
        if source is not None:
            return source
    return None


def interface_of_host(host: str) -> str | None:
    """Returns the interface of one of this machine's addresses, given as a name or number; None,
    which stands for all of them, for 0.0.0.0.
    """
    advice = (
        "UCX would open its ports on all interfaces. Give --data-host (data_host) an address that "
        "`ip address` shows; 0.0.0.0 if all interfaces are meant; or name the interfaces in "
        "UCX_NET_DEVICES"
    )
    try:
        ip = ipv4_of(host)
    except OSError as error:
        raise ValueError(
            f"data_host {host!r} has no IPv4 address: {error.strerror}. {advice}"
        ) from error
    if ip == ANY_ADDRESS:
        return None
    interface = interface_of(ip)
    if interface is None:
        named = host if host == ip else f"{host}, that is {ip},"
        raise ValueError(f"data_host {named} is on no network interface of this machine. {advice}")
    return interface


def _addresses() -> dict[str, list[Any]]:
    """The addresses of each interface."""
    # Comes with the extras of nodes and trainers, while every command imports this module.
    import psutil

    return psutil.net_if_addrs()
