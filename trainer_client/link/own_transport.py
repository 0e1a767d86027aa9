"""The transport that a rank opens."""

from __future__ import annotations

import threading

from data_plane.transport import TransportName
from data_plane.transport_choice import TransportChoice
from data_plane.transports import resolve_transport
from distca.contract import rpc
from distca.contract.reconnect import Addresses, reach
from trainer_client.link.contact import RankContact
from trainer_client.options import Placement, SessionOptions


def transport_of(options: SessionOptions, settings: rpc.RpcSettings) -> TransportChoice:
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
