"""The transport that a rank opens, and the address that it listens at."""

from __future__ import annotations

import ipaddress
import threading

from data_plane.interfaces import ipv4_of, source_towards
from data_plane.transport import TransportName
from data_plane.transport_choice import TransportChoice
from data_plane.transports import resolve_transport
from distca.contract import rpc
from distca.contract.addresses import hosts_of
from distca.contract.reconnect import Addresses, reach
from trainer_client.link.contact import RankContact
from trainer_client.options import Placement, RankOptions


def transport_of(options: RankOptions, settings: rpc.RpcSettings) -> TransportChoice:
    """The transport of a rank.

    Args:
        options: of its session.
        settings: how to reach the control plane, which is asked for ``auto`` on the pool alone.
    """
    asks = options.transport == TransportName.AUTO and options.placement is not Placement.IN_PLACE
    return resolve_transport(
        options.transport,
        one_host=options.one_host,
        peers=_pool_transports(settings) if asks else (),
    )


def _pool_transports(settings: rpc.RpcSettings) -> frozenset[TransportName]:
    """The transports of the pool's servers; empty if it has none."""
    told = reach(
        _ask,
        Addresses(settings),
        timeout_seconds=settings.connect_seconds,
        giving_up=threading.Event(),
    )
    return frozenset(TransportName(name) for name in told if name in set(TransportName))


def _ask(settings: rpc.RpcSettings) -> list[str]:
    contact = RankContact(settings)
    try:
        return contact.pool_transports()
    finally:
        contact.end()


def data_host_of(options: RankOptions, control_plane: rpc.RpcSettings) -> str:
    """The address that the rank listens at, whose network interface UCX is to use: ``data_host``,
    with one exception.

    While there are pool servers nobody calls the ranks, so their ``data_host`` may be a loopback
    address. They do call each other where documents span them and the pool has no server left, and
    so listen where they can be reached. The servers' addresses are not known before the first plan;
    they are taken to lie the same way as the control plane.

    Args:
        options: of the rank's session.
        control_plane: where it is.
    """
    host = options.data_host
    if options.one_host or options.placement is not Placement.POOL or not _is_loopback(host):
        return host
    return source_towards(hosts_of("address", control_plane.address)) or host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(ipv4_of(host)).is_loopback
    except OSError:
        return False
