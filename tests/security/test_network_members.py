"""Keys of the data network over real gRPC with mutual TLS: who is told what, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from control_plane.server import ControlPlane
from control_plane.settings import ControlPlaneSettings, DataNetworkSettings, parse_network
from distca.contract import rpc
from distca.contract.identity import Role
from distca.contract.reconnect import is_transient
from distca.v1 import data_network_pb2
from distca.wireguard.contact import NetworkContact
from distca.wireguard.state import MemberState
from tests.control_plane.service_harness import running
from tests.security.pki import Files, Pki, refused

NETWORK = IPv4Network("10.99.0.0/24")
LEASE_SECONDS = 3.0
ENDPOINT = "10.0.0.1:51820"


@contextmanager
def network_with(pki: Pki, **settings: Any) -> Iterator[ControlPlane]:
    with running(
        tls=pki.issue(Role.CONTROL_PLANE).for_server(),
        coordinator={"lease_seconds": LEASE_SECONDS},
        data_network=DataNetworkSettings(network=NETWORK, **settings),
    ) as control_plane:
        yield control_plane


@contextmanager
def contact(control_plane: ControlPlane, files: Files) -> Iterator[NetworkContact]:
    made = NetworkContact(rpc.RpcSettings(address=control_plane.address, **files.for_client()))
    try:
        yield made
    finally:
        made.end()


def addresses(answer: data_network_pb2.RenewMemberResponse) -> set[str]:
    return {peer.address for peer in answer.peers}


def test_a_member_hears_at_once_of_one_that_joins_and_of_one_that_leaves(pki: Pki) -> None:
    with (
        network_with(pki) as control_plane,
        contact(control_plane, pki.issue(Role.SERVER)) as node,
        contact(control_plane, pki.issue(Role.TRAINER)) as trainer,
    ):
        first, _ = node.join(MemberState(), ENDPOINT)
        known = node.renew(first.public_key, "")
        assert addresses(known) == {first.address}
        heard: list[data_network_pb2.RenewMemberResponse] = []

        def listen() -> None:
            answer = known
            while len(heard) < 2:
                answer = node.renew(first.public_key, answer.revision)
                if answer.peers:
                    heard.append(answer)

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        second, network = trainer.join(MemberState(), "10.0.0.2:51820")
        assert network == NETWORK
        assert addresses(trainer.renew(second.public_key, "")) == {first.address, second.address}
        while not heard:
            time.sleep(0.01)
        trainer.leave(second.public_key)
        listener.join(10.0)
        # The control plane may have become complete in between, which is an answer, too.
        assert {first.address, second.address} in [addresses(answer) for answer in heard]
        while addresses(node.renew(first.public_key, "")) != {first.address}:
            time.sleep(0.01)
        with pytest.raises(rpc.LeaseExpired):
            trainer.renew(second.public_key, "")


def test_a_renewal_without_news_answers_within_a_fifth_of_the_lease(pki: Pki) -> None:
    with (
        network_with(pki) as control_plane,
        contact(control_plane, pki.issue(Role.SERVER)) as node,
    ):
        state, _ = node.join(MemberState(), ENDPOINT)
        revision = ""
        while (answer := node.renew(state.public_key, revision)).revision != revision:
            revision, began = answer.revision, time.monotonic()
        assert time.monotonic() - began >= LEASE_SECONDS / 5 - 0.1
        assert len(answer.peers) == 0


def test_who_waits_is_let_go_when_the_control_plane_stops(pki: Pki) -> None:
    with ExitStack() as outer:
        with network_with(pki) as control_plane:
            node = outer.enter_context(contact(control_plane, pki.issue(Role.SERVER)))
            state, _ = node.join(MemberState(), ENDPOINT)
            waiting = outer.enter_context(ThreadPoolExecutor(1)).submit(_wait_on, node, state)
            time.sleep(0.2)
        error = waiting.exception(10.0)
        assert error is not None
        assert is_transient(error), "it looks for another control plane"


def _wait_on(node: NetworkContact, state: MemberState) -> None:
    revision = ""
    while True:
        revision = node.renew(state.public_key, revision).revision


def test_a_member_keeps_its_address_across_a_restart(pki: Pki, tmp_path: Path) -> None:
    with (
        running(
            tls=pki.issue(Role.CONTROL_PLANE).for_server(),
            state_dir=tmp_path,
            data_network=DataNetworkSettings(network=NETWORK),
        ) as control_plane,
        contact(control_plane, pki.issue(Role.TRAINER)) as trainer,
    ):
        state, _ = trainer.join(MemberState(), ENDPOINT)
    thief = replace(state, private_key=MemberState().private_key)
    with (
        running(
            tls=pki.issue(Role.CONTROL_PLANE).for_server(),
            state_dir=tmp_path,
            data_network=DataNetworkSettings(network=NETWORK),
        ) as control_plane,
        contact(control_plane, pki.issue(Role.TRAINER, "thief")) as first,
        contact(control_plane, pki.issue(Role.TRAINER)) as trainer,
    ):
        assert first.join(thief, ENDPOINT)[0].address != state.address
        assert trainer.join(state, ENDPOINT)[0] == state


def test_who_names_the_key_of_another_is_refused_and_counted(pki: Pki) -> None:
    with (
        network_with(pki) as control_plane,
        contact(control_plane, pki.issue(Role.TRAINER)) as trainer,
        contact(control_plane, pki.issue(Role.TRAINER, "thief")) as thief,
    ):
        state, _ = trainer.join(MemberState(), ENDPOINT)
        stub = thief._network
        about = stub.DescribeNetwork(data_network_pb2.DescribeNetworkRequest())
        with pytest.raises(rpc.PermissionDenied, match="does not show the private key"):
            stub.JoinNetwork(
                data_network_pb2.JoinNetworkRequest(
                    public_key=state.public_key,
                    proof=MemberState().proof(about.public_key),
                    endpoint=ENDPOINT,
                )
            )
        assert refused(control_plane, "DataNetwork/JoinNetwork", "wrong-proof") == 1
        # Whoever has stolen the private key, too, has the wrong certificate.
        with pytest.raises(rpc.PermissionDenied, match="another identity"):
            thief.join(state, ENDPOINT)


def test_a_control_plane_without_a_network_says_so(pki: Pki) -> None:
    with (
        running(tls=pki.issue(Role.CONTROL_PLANE).for_server()) as control_plane,
        contact(control_plane, pki.issue(Role.SERVER)) as node,
        pytest.raises(rpc.NoDataNetwork, match="--data-network"),
    ):
        node.join(MemberState(), ENDPOINT)


def test_keys_are_not_handed_out_over_plaintext() -> None:
    with pytest.raises(ValueError, match="worth nothing; give tls_certificate"):
        ControlPlaneSettings(data_network=DataNetworkSettings(network=NETWORK))


@pytest.mark.parametrize("text", ["10.99.0.1/16", "fd00::/64", "10.99.0.0/33", "yes"])
def test_a_network_is_an_ipv4_network(text: str) -> None:
    with pytest.raises(ValueError, match=r"data_network is .* 10\.99\.0\.0/16"):
        parse_network(text)


def test_a_network_has_room() -> None:
    with pytest.raises(ValueError, match="no room for members"):
        DataNetworkSettings(network=IPv4Network("10.99.0.0/31"))
