"""A member of the data network without a network: its state, its peers, and errors of the tools."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import pytest

from distca.v1 import data_network_pb2
from distca.wireguard.peers import Peer, PeerError, merged
from distca.wireguard.settings import MemberSettings
from distca.wireguard.state import MemberState, StateFileError
from distca.wireguard.tools import (
    InterfaceExistsError,
    NoPrivilegeError,
    NoToolError,
    PortTakenError,
    TunnelError,
    run_tool,
)
from distca.wireguard.tunnel import Tunnel

NETWORK = IPv4Network("10.99.0.0/24")
ADD = "ip link add dev dcatest type wireguard"


def peer(number: int, *, address: int | None = None, endpoint: str = "10.0.0.1:51820") -> Peer:
    return Peer(bytes([number]) * 32, endpoint, NETWORK[address or number])


def test_a_member_is_the_same_after_it_was_kept(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = MemberState.load(path).at("10.99.0.7", b"ticket")
    state.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    again = MemberState.load(path)
    assert (again.public_key, again.address, again.ticket) == (
        state.public_key,
        "10.99.0.7",
        b"ticket",
    )
    state.at("10.99.0.8", b"").save(path)
    assert MemberState.load(path).address == "10.99.0.8"


def test_a_state_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    MemberState().save(path)
    path.chmod(0o640)
    with pytest.raises(StateFileError, match="chmod 600"):
        MemberState.load(path)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"private_key": "c2VjcmV0", "address": ""}'])
def test_a_state_of_no_use_is_named_and_not_shown(tmp_path: Path, content: str) -> None:
    path = tmp_path / "state"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(StateFileError, match="remove it to join as a new member") as caught:
        MemberState.load(path)
    assert "c2VjcmV0" not in str(caught.value)


def test_no_repr_shows_the_private_key() -> None:
    state = MemberState()
    assert state.private_text not in repr(state)
    assert base64.b64decode(state.private_text) != state.public_key


def test_a_peer_may_send_from_its_own_address_alone() -> None:
    lines = peer(7).configuration.splitlines()
    assert lines[0] == "[Peer]"
    assert lines[-1] == "AllowedIPs = 10.99.0.7/32"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("public_key", bytes(31)),
        ("endpoint", "10.0.0.1:1\nAllowedIPs = 0.0.0.0/0"),
        ("endpoint", "somewhere:51820"),
        ("address", "10.98.0.1"),
        ("address", "10.99.0.1/0"),
    ],
)
def test_a_peer_of_no_use_is_refused(field: str, value: Any) -> None:
    fields = {"public_key": bytes(32), "endpoint": "10.0.0.1:51820", "address": "10.99.0.1"}
    message = data_network_pb2.NetworkPeer(**{**fields, field: value})
    with pytest.raises(PeerError, match="of no use"):
        Peer.from_proto(message, NETWORK)


def test_peers_are_taken_out_once_the_list_is_complete() -> None:
    known = [peer(1), peer(2)]
    assert merged(known, [peer(3)], complete=True) == (peer(3),)
    assert merged(known, [peer(3)], complete=False) == (peer(1), peer(2), peer(3))


def test_what_is_told_now_replaces_the_key_and_the_address_of_before() -> None:
    known = [peer(1), peer(2)]
    moved, heir = peer(1, address=9), peer(5, address=2)
    assert merged(known, [moved, heir], complete=False) == (heir, moved)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host", "node-1"),
        ("port", 0),
        ("interface", "../x"),
        ("interface", "-f"),
        ("interface", "a-name-that-is-too-long"),
        ("mtu", 100),
        ("connect_seconds", 0.0),
        ("control_plane", "nowhere"),
        ("certificate_file", None),
    ],
)
def test_settings_of_no_use_are_refused(field: str, value: Any) -> None:
    settings: dict[str, Any] = {
        "control_plane": "localhost:7700",
        "host": "10.0.0.1",
        "ca_file": Path("ca"),
        "certificate_file": Path("crt"),
        "key_file": Path("key"),
    }
    MemberSettings(**settings)
    with pytest.raises(ValueError, match=" is "):
        MemberSettings(**{**settings, field: value})


def test_a_member_needs_a_certificate() -> None:
    with pytest.raises(ValueError, match="tls_certificate is not given; keys are handed out over"):
        MemberSettings(control_plane="localhost:7700", host="10.0.0.1")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes programs of these names the only ones: each a script."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(**scripts: str) -> None:
        for name, script in scripts.items():
            path = tmp_path / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)

    return make


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tunnel(name: str = "dcatest", port: int | None = None) -> Tunnel:
    return Tunnel(name, port=port or free_port(), private_text=MemberState().private_text, mtu=1420)


def test_a_missing_program_is_named_with_its_package(tools: Callable[..., None]) -> None:
    tools(ip="exit 0")
    with pytest.raises(NoToolError, match="wg is not installed: apt-get install wireguard-tools"):
        tunnel().open(replace=False)


def test_a_process_that_may_not_is_told_what_it_needs(tools: Callable[..., None]) -> None:
    tools(ip='echo "RTNETLINK answers: Operation not permitted" >&2; exit 2', wg="exit 0")
    with pytest.raises(NoPrivilegeError, match=f"{ADD} failed: .*CAP_NET_ADMIN"):
        tunnel().open(replace=False)


def test_a_kernel_without_wireguard_needs_wireguard_go(tools: Callable[..., None]) -> None:
    tools(ip='echo "Error: Unknown device type." >&2; exit 2', wg="exit 0")
    with pytest.raises(TunnelError, match=r"no WireGuard .* wireguard-go, .* is not installed"):
        tunnel().open(replace=False)


def test_what_wireguard_go_says_is_told(tools: Callable[..., None]) -> None:
    tools(
        ip='echo "Error: Unknown device type." >&2; exit 2',
        wg="exit 1",
        wireguard_go='echo "Failed to create TUN device: no such file" >&2; exit 1',
    )
    failing = tunnel()
    with pytest.raises(TunnelError, match="did not start: Failed to create TUN device"):
        failing.open(replace=False)
    failing.close()


def test_an_interface_of_the_name_is_left_alone(tools: Callable[..., None]) -> None:
    tools(ip="exit 1", wg="exit 1")
    with pytest.raises(InterfaceExistsError, match=r"there is an interface lo: .* --replace"):
        tunnel("lo").open(replace=False)


def test_a_taken_port_is_named(tools: Callable[..., None]) -> None:
    tools(ip="exit 0", wg="exit 0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("0.0.0.0", 0))
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"UDP port {port} is taken"):
            tunnel(port=port).open(replace=False)


def test_a_program_that_hangs_is_ended(
    tools: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distca.wireguard.tools.COMMAND_SECONDS", 0.2)
    tools(wg="exec /bin/sleep 30")
    with pytest.raises(TunnelError, match=r"wg show did not end within 0\.2 s"):
        run_tool("wg", "show")


def test_the_private_key_is_no_argument(tools: Callable[..., None], tmp_path: Path) -> None:
    tools(wg=f'echo "$@" > {tmp_path}/arguments; /bin/cat > {tmp_path}/stdin')
    state = MemberState()
    made = Tunnel("dcatest", port=51820, private_text=state.private_text, mtu=1420)
    made.set_peers([peer(1)])
    assert (tmp_path / "arguments").read_text() == "syncconf dcatest /dev/stdin\n"
    assert state.private_text in (tmp_path / "stdin").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs CAP_NET_ADMIN")
def test_an_interface_is_made_and_removed() -> None:
    """In a network namespace of its own, if this machine can make WireGuard interfaces at all."""
    made = tunnel()
    try:
        made.open(replace=False)
    except TunnelError as error:
        pytest.skip(str(error))
    try:
        made.bring_up(IPv4Address("10.99.255.1"), IPv4Network("10.99.255.0/24"))
        made.set_peers([Peer(MemberState().public_key, "192.0.2.1:51820", NETWORK[7])])
        shown = subprocess.run(["wg", "show", "dcatest"], capture_output=True, text=True).stdout
        assert "allowed ips: 10.99.0.7/32" in shown
        made.set_peers([])
        shown = subprocess.run(["wg", "show", "dcatest"], capture_output=True, text=True).stdout
        assert "peer" not in shown
        made.check()
    finally:
        made.close()
    with pytest.raises(TunnelError, match="dcatest is gone"):
        made.check()
