"""A member of the data network and a control plane that changes: real gRPC with mutual TLS, and a
tunnel that only notes what it is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import pytest

from control_plane.server import ControlPlane
from control_plane.settings import DataNetworkSettings
from distca.contract.identity import Role
from distca.wireguard.member import AddressLostError, Member
from distca.wireguard.peers import Peer
from distca.wireguard.settings import MemberSettings
from distca.wireguard.tools import TunnelError
from tests.control_plane.service_harness import eventually, running
from tests.security.pki import Pki

NETWORK = IPv4Network("10.99.0.0/16")


@dataclass
class NotedTunnel:
    """Stands for the interface."""

    name: str
    peers: tuple[Peer, ...] = ()
    is_open: bool = False
    fails: list[str] = field(default_factory=list)

    def open(self, *, replace: bool) -> None:
        self.is_open = True

    def bring_up(self, address: IPv4Address, network: IPv4Network) -> None:
        assert address in network

    def set_peers(self, peers: Sequence[Peer]) -> None:
        self.peers = tuple(peers)

    def check(self) -> None:
        if self.fails:
            raise TunnelError(self.fails[0])

    def close(self) -> None:
        self.is_open = False


@dataclass
class Followed:
    """A member, its tunnel, and the addresses that it was given."""

    member: Member
    tunnel: NotedTunnel
    told: list[str]


Join = Callable[..., Followed]


@pytest.fixture
def join(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    files = pki.issue(Role.SERVER)
    tunnels: list[NotedTunnel] = []
    members: list[Member] = []

    def make(name: str, **_: Any) -> NotedTunnel:
        tunnels.append(NotedTunnel(name))
        return tunnels[-1]

    monkeypatch.setattr("distca.wireguard.member.Tunnel", make)

    def started(address: str, **more: Any) -> Followed:
        told: list[str] = []
        settings = MemberSettings(
            control_plane=address,
            **files.for_client(),
            host=f"10.0.0.{len(members) + 1}",
            **more,
        )
        members.append(Member(settings, told.append))
        members[-1].start()
        return Followed(members[-1], tunnels[-1], told)

    yield started
    for member in members:
        member.leave()


@contextmanager
def control_plane_at(pki: Pki, address: str, state: Path) -> Iterator[ControlPlane]:
    with running(
        tls=pki.issue(Role.CONTROL_PLANE).for_server(),
        listen_address=address,
        state_dir=state,
        coordinator={"lease_seconds": 3.0},
        data_network=DataNetworkSettings(network=NETWORK),
    ) as control_plane:
        yield control_plane


def test_peers_stay_while_the_control_plane_is_away_and_it_is_found_again(
    pki: Pki, join: Join, tmp_path: Path
) -> None:
    with control_plane_at(pki, "127.0.0.1:0", tmp_path) as control_plane:
        address = control_plane.address
        one, other = join(address), join(address)
        eventually(lambda: len(one.tunnel.peers) == len(other.tunnel.peers) == 1)
    before = one.tunnel.peers
    time.sleep(1.0)
    assert one.tunnel.peers == before
    with control_plane_at(pki, address, tmp_path):
        third = join(address)
        eventually(lambda: len(one.tunnel.peers) == 2)
        assert set(before) < set(one.tunnel.peers)
        third.member.leave()
        eventually(lambda: one.tunnel.peers == before)
        eventually(lambda: [str(peer.address) for peer in other.tunnel.peers] == one.told)


def test_a_member_whose_address_is_lost_ends_and_says_so(
    pki: Pki, join: Join, tmp_path: Path
) -> None:
    with control_plane_at(pki, "127.0.0.1:0", tmp_path / "one") as control_plane:
        address = control_plane.address
        followed = join(address)
        eventually(lambda: bool(followed.told))
    # Another secret: it recognises nobody.
    with control_plane_at(pki, address, tmp_path / "other"):
        eventually(lambda: not followed.member.wait(0.0))
        with pytest.raises(AddressLostError, match=f"which had {followed.told[0]}"):
            followed.member.check()


def test_a_member_that_has_lost_its_lease_joins_again(
    pki: Pki, join: Join, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with control_plane_at(pki, "127.0.0.1:0", tmp_path) as control_plane:
        one, other = join(control_plane.address), join(control_plane.address)
        eventually(lambda: len(one.tunnel.peers) == 1)
        contact = one.member._contact
        assert contact is not None
        with caplog.at_level("WARNING", "distca.wireguard.member"):
            contact.leave(one.member._state.public_key)
            eventually(lambda: "joining again" in caplog.text)
        # Once no list of before can be the reason.
        time.sleep(1.0)
        eventually(lambda: len(other.tunnel.peers) == 1)
        assert one.member.wait(0.0)


def test_a_member_that_starts_again_with_its_state_has_its_key_and_address(
    pki: Pki, join: Join, tmp_path: Path
) -> None:
    kept = tmp_path / "member"
    with control_plane_at(pki, "127.0.0.1:0", tmp_path / "state") as control_plane:
        one, other = (
            join(control_plane.address, state_file=kept),
            join(control_plane.address),
        )
        eventually(lambda: len(other.tunnel.peers) == 1)
        (before,) = other.tunnel.peers
        one.member.leave()
        eventually(lambda: other.tunnel.peers == ())
        again = join(control_plane.address, state_file=kept)
        eventually(lambda: len(other.tunnel.peers) == 1)
        (after,) = other.tunnel.peers
        assert again.told == one.told
        assert (after.public_key, after.address) == (before.public_key, before.address)


def test_an_interface_that_is_gone_ends_the_member(pki: Pki, join: Join, tmp_path: Path) -> None:
    with control_plane_at(pki, "127.0.0.1:0", tmp_path) as control_plane:
        followed = join(control_plane.address)
        eventually(lambda: bool(followed.told))
        followed.tunnel.fails.append("it is gone")
        eventually(lambda: not followed.member.wait(0.0))
        with pytest.raises(TunnelError, match="it is gone"):
            followed.member.check()


def test_a_member_leaves_while_it_looks_for_the_control_plane(join: Join) -> None:
    followed = join("127.0.0.1:1")
    time.sleep(0.3)
    began = time.monotonic()
    followed.member.leave()
    assert time.monotonic() - began < 10.0
    assert not followed.member.wait(0.0)
    assert not followed.tunnel.is_open
    followed.member.check()
