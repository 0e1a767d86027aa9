"""The members that this one may reach, as the control plane tells them. Pure state."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, ip_address

from distca.contract.addresses import split_address
from distca.contract.network_proof import KEY_BYTES
from distca.v1 import data_network_pb2


class PeerError(ValueError):
    """What the control plane tells of a peer makes no sense."""


@dataclass(frozen=True)
class Peer:
    """Another member.

    Attributes:
        public_key: 32 bytes.
        endpoint: IP address and UDP port of its machine.
        address: in the network.
    """

    public_key: bytes
    endpoint: str
    address: IPv4Address

    @classmethod
    def from_proto(cls, message: data_network_pb2.NetworkPeer, network: IPv4Network) -> Peer:
        """The peer in ``message``.

        Raises:
            PeerError: a field is wrong: what is in it goes into a configuration.
        """
        try:
            host, _ = split_address("endpoint", message.endpoint)
            ip_address(host)
            address = IPv4Address(message.address)
            is_sound = len(message.public_key) == KEY_BYTES
        except ValueError as error:
            raise PeerError(f"the control plane named a peer of no use: {error}") from error
        if not is_sound or address not in network:
            raise PeerError(
                f"the control plane named a peer of no use, at {message.endpoint!r} and {address}; "
                f"it needs a key of {KEY_BYTES} bytes and an address of {network}"
            )
        return cls(message.public_key, message.endpoint, address)

    @property
    def configuration(self) -> str:
        """As in a configuration of WireGuard. The one address that it may send from is its own: no
        member can pose as another."""
        key = base64.b64encode(self.public_key).decode()
        return (
            f"[Peer]\nPublicKey = {key}\nEndpoint = {self.endpoint}\n"
            f"AllowedIPs = {self.address}/32\n"
        )


def merged(known: Iterable[Peer], told: Iterable[Peer], *, complete: bool) -> tuple[Peer, ...]:
    """The peers that there are after the control plane has told some.

    Args:
        known: those of before.
        told: those of now.
        complete: these are all. If not, those of before stay, unless one told has the key or the
            address: a control plane that has just started has not heard from everybody.
    """
    peers = {peer.address: peer for peer in told}
    if not complete:
        keys = {peer.public_key for peer in peers.values()}
        for peer in known:
            if peer.public_key not in keys:
                peers.setdefault(peer.address, peer)
    return tuple(peers[address] for address in sorted(peers))
