"""The address of this machine at which a rank exchanges rows."""

from __future__ import annotations

import ipaddress

from data_plane.interfaces import ipv4_of, source_towards
from distca.contract import rpc
from distca.contract.addresses import hosts_of
from trainer_client.options import Placement, RankOptions


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
