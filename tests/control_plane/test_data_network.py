"""Members of the data network: addresses, leases, who sees whom, and what nobody can take."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from control_plane.access.job_keys import JobKeys
from control_plane.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    LeaseExpiredError,
    OtherOwnerError,
    QuotaError,
    WrongProofError,
)
from control_plane.network.data_network import DataNetwork, NetworkMember
from control_plane.network.network_keys import NetworkKeys
from distca.contract.identity import Identity, Role
from distca.contract.network_proof import member_proof
from distca.wireguard.state import MemberState

LEASE_SECONDS = 9.0
SECRET = bytes(range(32))
NODE = Identity(role=Role.SERVER, name="nodes")
ONE = Identity(role=Role.TRAINER, name="one")
OTHER = Identity(role=Role.TRAINER, name="other")


class Network:
    """A network with a clock, and members that are numbered."""

    def __init__(self, network: str = "10.99.0.0/24", *, most: int = 4, now: float = 100.0) -> None:
        self.now = now
        self.n_changes = 0
        self.members = DataNetwork(
            IPv4Network(network),
            NetworkKeys(JobKeys(SECRET)),
            lease_seconds=LEASE_SECONDS,
            max_members_per_identity=most,
            changed=self._changed,
            now=now,
        )

    def _changed(self) -> None:
        self.n_changes += 1

    def join(
        self,
        owner: Identity,
        number: int,
        *,
        endpoint: str = "10.0.0.1:51820",
        had: str = "",
        ticket: bytes = b"",
    ) -> NetworkMember:
        return self.members.join(owner, key(number), endpoint, had=had, ticket=ticket, now=self.now)

    def pass_time(self, seconds: float, *renewing: tuple[Identity, int]) -> None:
        """Time passes in steps, in which some members renew."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            for owner, number in renewing:
                self.members.renew(owner, key(number), now=self.now)
            self.members.sweep(now=self.now)

    def seen_by(self, owner: Identity) -> set[bytes]:
        return {member.public_key for member in self.members.seen_by(owner)}


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_members_have_addresses_of_the_network_and_no_two_the_same() -> None:
    network = Network("10.99.0.0/29", most=8)
    addresses = {network.join(NODE, number).address for number in range(6)}
    assert addresses == set(IPv4Network("10.99.0.0/29").hosts())
    with pytest.raises(QuotaError, match=r"all 6 addresses of the data network 10\.99\.0\.0/29"):
        network.join(NODE, 6)


def test_nodes_see_everybody_and_trainers_the_nodes_and_their_own_tenant() -> None:
    network = Network()
    for number, owner in enumerate((NODE, ONE, ONE, OTHER)):
        network.join(owner, number)
    assert network.seen_by(NODE) == {key(0), key(1), key(2), key(3)}
    assert network.seen_by(ONE) == {key(0), key(1), key(2)}
    assert network.seen_by(OTHER) == {key(0), key(3)}


def test_a_trainer_named_like_a_node_is_no_node() -> None:
    network = Network()
    network.join(ONE, 1)
    assert network.seen_by(Identity(role=Role.TRAINER, name=NODE.name)) == set()


def test_a_lease_that_is_not_renewed_ends() -> None:
    network = Network()
    network.join(NODE, 0)
    network.join(ONE, 1)
    network.pass_time(LEASE_SECONDS, (NODE, 0))
    assert network.seen_by(NODE) == {key(0), key(1)}
    network.pass_time(1.0, (NODE, 0))
    assert network.seen_by(NODE) == {key(0)}
    with pytest.raises(LeaseExpiredError, match="spiffe://distca/trainer/one has no member"):
        network.members.renew(ONE, key(1), now=network.now)


def test_nobody_is_taken_out_after_the_control_plane_was_stopped() -> None:
    network = Network()
    network.join(NODE, 0)
    network.join(ONE, 1)
    network.now += 10 * LEASE_SECONDS
    network.members.sweep(now=network.now)
    network.members.renew(NODE, key(0), now=network.now)
    network.members.sweep(now=network.now)
    assert network.seen_by(NODE) == {key(0), key(1)}


def test_who_leaves_is_out_at_once_and_nobody_leaves_for_another() -> None:
    network = Network()
    network.join(ONE, 1)
    with pytest.raises(LeaseExpiredError):
        network.members.leave(OTHER, key(1))
    network.members.leave(ONE, key(1))
    assert network.seen_by(ONE) == set()


def test_a_list_is_complete_once_everybody_had_time_to_come_back() -> None:
    network = Network()
    network.join(NODE, 0)
    network.pass_time(LEASE_SECONDS - 1.0, (NODE, 0))
    changes = network.n_changes
    assert not network.members.complete
    network.pass_time(1.0, (NODE, 0))
    assert network.members.complete
    assert network.n_changes == changes + 1


def test_a_member_that_comes_back_has_its_address_even_where_another_was_first() -> None:
    before = Network("10.99.0.0/30", most=8)
    tickets = {}
    for number in range(2):
        member = before.join(ONE, number)
        tickets[number] = (str(member.address), before.members.ticket_of(member))
    # After a restart, in the other order: without its ticket one would have the other's place.
    after = Network("10.99.0.0/30", most=8)
    for number, (had, ticket) in sorted(tickets.items(), reverse=True):
        assert str(after.join(ONE, number, had=had, ticket=ticket).address) == had


def test_nobody_comes_back_to_the_address_of_another() -> None:
    before = Network()
    mine = before.join(ONE, 1)
    ticket = before.members.ticket_of(mine)
    after = Network()
    stolen = after.join(OTHER, 2, had=str(mine.address), ticket=ticket)
    assert stolen.address != mine.address
    assert after.join(ONE, 1, had=str(mine.address), ticket=ticket).address == mine.address


def test_an_address_that_was_given_away_is_refused_by_name() -> None:
    network = Network("10.99.0.0/30")
    member = network.join(ONE, 1)
    had, ticket = str(member.address), network.members.ticket_of(member)
    network.members.leave(ONE, key(1))
    for number in (2, 3):
        network.join(OTHER, number)
    network.members.leave(
        OTHER, key(2 if network.members.get(OTHER, key(3)).address == member.address else 3)
    )
    with pytest.raises(AlreadyExistsError, match=f"{had} was given to another member"):
        network.join(ONE, 1, had=had, ticket=ticket)


def test_the_key_of_another_identity_is_refused() -> None:
    network = Network()
    network.join(ONE, 1)
    with pytest.raises(OtherOwnerError, match="another identity than spiffe://distca/trainer/oth"):
        network.join(OTHER, 1)


def test_an_identity_has_so_many_members_and_no_more() -> None:
    network = Network(most=2)
    network.join(ONE, 1)
    network.join(ONE, 2)
    with pytest.raises(QuotaError, match=r"2 members.*max_network_members_per_identity"):
        network.join(ONE, 3)
    network.join(OTHER, 4)
    network.members.leave(ONE, key(1))
    network.join(ONE, 3)


def test_a_member_moves_to_another_endpoint() -> None:
    network = Network()
    first = network.join(ONE, 1).address
    changes = network.n_changes
    moved = network.join(ONE, 1, endpoint="[fd00:0::7]:51821")
    assert (moved.address, moved.endpoint) == (first, "[fd00::7]:51821")
    assert network.n_changes == changes + 1


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "10.0.0.1",
        "10.0.0.1:0",
        "10.0.0.1:65536",
        "node-1.example:51820",
        "10.0.0.1:51820\nAllowedIPs = 0.0.0.0/0",
        "0.0.0.0:51820",
        "224.0.0.1:51820",
        "10.99.0.7:51820",
    ],
)
def test_an_endpoint_is_an_address_outside_of_the_network(endpoint: str) -> None:
    with pytest.raises(InvalidRequestError, match="endpoint is"):
        Network().join(ONE, 1, endpoint=endpoint)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="address is 'mine'"):
        Network().join(ONE, 1, had="mine")


def test_a_proof_shows_the_private_key() -> None:
    keys = NetworkKeys(JobKeys(SECRET))
    member = MemberState()
    keys.check_proof(member.public_key, member.proof(keys.public_key))
    stranger = X25519PrivateKey.generate()
    forged = member_proof(stranger, keys.public_key, member.public_key)
    with pytest.raises(WrongProofError):
        keys.check_proof(member.public_key, forged)


@pytest.mark.parametrize("public_key", [b"", bytes(31), bytes(32)])
def test_what_is_no_key_is_refused(public_key: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="public_key"):
        NetworkKeys(JobKeys(SECRET)).check_proof(public_key, bytes(32))


def test_keys_outlive_the_process_with_the_secret_and_only_with_it() -> None:
    address = IPv4Address("10.99.0.7")
    ticket = NetworkKeys(JobKeys(SECRET)).ticket(ONE, key(1), address)
    again, other = NetworkKeys(JobKeys(SECRET)), NetworkKeys(JobKeys())
    assert again.is_ticket(ticket, ONE, key(1), address)
    assert not other.is_ticket(ticket, ONE, key(1), address)
    assert not again.is_ticket(ticket, OTHER, key(1), address)
    assert not again.is_ticket(ticket, ONE, key(2), address)
    assert again.public_key != other.public_key
