"""Who is in the encrypted data network, at which address, and who sees whom. Pure state: the time
comes in.

Nothing is stored. After a restart members come back with the address that they had, and a ticket
that shows it; until all had time for that, the list of members is not complete.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, ip_address

from control_plane.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    LeaseExpiredError,
    OtherOwnerError,
    QuotaError,
)
from control_plane.jobs.isolation import IsolationDetector
from control_plane.network.network_keys import NetworkKeys
from distca.contract.addresses import split_address
from distca.contract.identity import Identity, Role

logger = logging.getLogger(__name__)

_MAX_ENDPOINT_CHARACTERS = 64
"""An IPv6 address in brackets, and a port."""


@dataclass
class NetworkMember:
    """A member.

    Attributes:
        owner: whose certificate it showed.
        public_key: 32 bytes of WireGuard.
        endpoint: IP address and UDP port that others reach it at.
        address: in the network.
        renewed_at: since when its lease runs.
    """

    owner: Identity
    public_key: bytes
    endpoint: str
    address: IPv4Address
    renewed_at: float


class DataNetwork:
    """The members of one network.

    Args:
        network: that addresses are given out of, all but the first and the last.
        keys: tell who may have which address.
        lease_seconds: how long a member lives without renewal.
        max_members_per_identity: members that one identity may have.
        changed: called after each change of what members are told.
        now: when the network begins.

    Attributes:
        network: as given.
        lease_seconds: as given.
        complete: every member that there is had the time to come back.
    """

    def __init__(
        self,
        network: IPv4Network,
        keys: NetworkKeys,
        *,
        lease_seconds: float,
        max_members_per_identity: int,
        changed: Callable[[], None],
        now: float,
    ) -> None:
        self.network = network
        self.lease_seconds = lease_seconds
        self.complete = False
        self._keys = keys
        self._max_members_per_identity = max_members_per_identity
        self._changed = changed
        self._isolation = IsolationDetector(lease_seconds=lease_seconds, now=now)
        self._complete_at = now + lease_seconds
        self._by_key: dict[bytes, NetworkMember] = {}
        self._by_address: dict[IPv4Address, NetworkMember] = {}
        self._n_of: Counter[Identity] = Counter()

    def __len__(self) -> int:
        return len(self._by_key)

    def lead(self, *, now: float) -> None:
        """Members come from another control plane, or from the process before this one."""
        self._complete_at = now + self.lease_seconds
        self._heard(now)

    def join(
        self,
        owner: Identity,
        public_key: bytes,
        endpoint: str,
        *,
        had: str,
        ticket: bytes,
        now: float,
    ) -> NetworkMember:
        """The member of this key, which joins or comes back. It has proved its key.

        Args:
            owner: who it is.
            public_key: 32 bytes.
            endpoint: as it says.
            had: the address that it was given before; empty if none.
            ticket: what shows that.
            now: seconds.

        Raises:
            InvalidRequestError: the endpoint is none, or the address.
            OtherOwnerError: another identity has the key.
            AlreadyExistsError: another member was given the address meanwhile.
            QuotaError: the identity has too many members, or the network is full.
        """
        endpoint = self._checked_endpoint(endpoint)
        self._heard(now)
        member = self._by_key.get(public_key)
        if member is None:
            self._check_room(owner)
            address = self._address_of(owner, public_key, had, ticket)
            member = NetworkMember(owner, public_key, endpoint, address, now)
            self._by_key[public_key] = self._by_address[address] = member
            self._n_of[owner] += 1
            logger.info(
                "%s joined the data network at %s, reached at %s", owner.uri, address, endpoint
            )
            self._changed()
        elif member.owner != owner:
            raise OtherOwnerError(
                f"another identity than {owner.uri} has joined with this public key; make a key of "
                "your own"
            )
        elif member.endpoint != endpoint:
            member.endpoint = endpoint
            self._changed()
        member.renewed_at = now
        return member

    def renew(self, owner: Identity, public_key: bytes, *, now: float) -> None:
        """The lease of a member begins anew. Raises as :meth:`get`."""
        self.get(owner, public_key).renewed_at = now
        self._heard(now)

    def leave(self, owner: Identity, public_key: bytes) -> None:
        """A member goes. Raises as :meth:`get`."""
        member = self.get(owner, public_key)
        self._remove(member)
        logger.info("%s left the data network at %s", owner.uri, member.address)
        self._changed()

    def get(self, owner: Identity, public_key: bytes) -> NetworkMember:
        """The member of this key.

        Raises:
            LeaseExpiredError: ``owner`` has no such member.
        """
        member = self._by_key.get(public_key)
        if member is None or member.owner != owner:
            raise LeaseExpiredError(
                f"{owner.uri} has no member with the key that came; its lease expired after "
                f"{self.lease_seconds:g} s without renewal, or it has left"
            )
        return member

    def ticket_of(self, member: NetworkMember) -> bytes:
        """With which the member comes back."""
        return self._keys.ticket(member.owner, member.public_key, member.address)

    def seen_by(self, owner: Identity) -> list[NetworkMember]:
        """The members that those of ``owner`` may reach: attention nodes see everybody, trainers
        the nodes and those of their own tenant."""
        return [
            member
            for member in self._by_key.values()
            if Role.SERVER in (owner.role, member.owner.role) or member.owner == owner
        ]

    def sweep(self, *, now: float) -> None:
        """Takes out whose lease has run out; nobody while nobody at all is heard."""
        if self._isolation.is_isolated(len(self), now=now):
            return
        gone = [m for m in self._by_key.values() if now - m.renewed_at > self.lease_seconds]
        for member in gone:
            self._remove(member)
            logger.warning(
                "%s lost its lease of %s in the data network", member.owner.uri, member.address
            )
        completed = not self.complete and now >= self._complete_at
        if completed:
            self.complete = True
        if gone or completed:
            self._changed()

    def _heard(self, now: float) -> None:
        if self._isolation.heard(now=now):
            for member in self._by_key.values():
                member.renewed_at = now

    def _remove(self, member: NetworkMember) -> None:
        del self._by_key[member.public_key]
        del self._by_address[member.address]
        self._n_of[member.owner] -= 1
        if not self._n_of[member.owner]:
            del self._n_of[member.owner]

    def _check_room(self, owner: Identity) -> None:
        if self._n_of[owner] >= self._max_members_per_identity:
            raise QuotaError(
                f"{owner.uri} has {self._n_of[owner]} members in the data network, as many as one "
                "identity may (max_network_members_per_identity); end some"
            )
        if len(self) >= self._n_places:
            raise QuotaError(
                f"all {self._n_places} addresses of the data network {self.network} are given out; "
                "configure a larger one"
            )

    def _address_of(
        self, owner: Identity, public_key: bytes, had: str, ticket: bytes
    ) -> IPv4Address:
        if had:
            address = _checked_address(had)
            if address in self.network and self._keys.is_ticket(ticket, owner, public_key, address):
                if address in self._by_address:
                    raise AlreadyExistsError(
                        f"{address} was given to another member while {owner.uri}, which had it, "
                        "was away; start this member again without its state"
                    )
                return address
        place = self._keys.place(public_key, self._n_places)
        while (address := self.network[1 + place]) in self._by_address:
            place = (place + 1) % self._n_places
        return address

    @property
    def _n_places(self) -> int:
        return self.network.num_addresses - 2

    def _checked_endpoint(self, endpoint: str) -> str:
        try:
            host, number = split_address("endpoint", endpoint[:_MAX_ENDPOINT_CHARACTERS])
            address = ip_address(host)
        except ValueError as error:
            raise InvalidRequestError(
                f"endpoint is {endpoint[:_MAX_ENDPOINT_CHARACTERS]!r}; it must be an IP address "
                "and a UDP port, for example 10.0.0.2:51820 or [fd00::2]:51820"
            ) from error
        if address.is_unspecified or address.is_multicast or address in self.network:
            raise InvalidRequestError(
                f"endpoint is {endpoint}; it must be an address of the machine that others reach "
                f"it at, outside of the data network {self.network}"
            )
        return f"[{address}]:{number}" if address.version == 6 else f"{address}:{number}"


def _checked_address(text: str) -> IPv4Address:
    try:
        return IPv4Address(text)
    except ValueError as error:
        raise InvalidRequestError(
            f"address is {text[:64]!r}; it must be the one that the member was given, or empty"
        ) from error
