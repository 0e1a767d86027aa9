"""An encrypted data network in network namespaces: members by ``distca wireguard``, rows through
the tunnel over real UCX, and strangers who get no answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distca.contract.identity import Role
from tests.chaos.hosts import network
from tests.cluster import Process
from tests.security.pki import Pki
from tests.security.tunnelled import LEASE_SECONDS, Tunnelled, why_no_tunnels

WHY_NOT = why_no_tunnels()
pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(600),
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no tunnels: {WHY_NOT}"),
]

HOSTS = ("control-plane", "node", "trainer", "tenant", "stranger")

_CONNECT = """
import socket, sys
for port in map(int, sys.argv[2:]):
    try:
        socket.create_connection((sys.argv[1], port), 1.0).close()
    except OSError:
        continue
    print(port)
"""


@pytest.fixture
def hosts(tmp_path: Path, pki: Pki) -> Iterator[Tunnelled]:
    with network(HOSTS) as switch:
        tunnelled = Tunnelled(tmp_path, pki, switch)
        try:
            yield tunnelled
        finally:
            tunnelled.close()


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def listening_ports(hosts: Tunnelled, host: str) -> list[str]:
    """TCP ports that processes of ``host`` listen on, at any address."""
    lines = hosts.run(host, "ss", "--tcp", "--listening", "--numeric", "--no-header").stdout
    return sorted({line.split()[3].rpartition(":")[2] for line in lines.splitlines()})


def answering(hosts: Tunnelled, source: str, address: str, ports: list[str]) -> list[str]:
    """Those of ``ports`` that take a connection from ``source``."""
    python = hosts.run(source, "python3", "-c", _CONNECT, address, *ports)
    assert python.returncode == 0, python.stderr
    return python.stdout.split()


def test_rows_go_through_the_tunnel_and_strangers_get_no_answer(hosts: Tunnelled) -> None:
    hosts.start_control_plane()
    node = hosts.join("node", Role.SERVER).addresses["address"]
    member = hosts.join("trainer", Role.TRAINER)
    trainer = member.addresses["address"]
    eventually(lambda: len(hosts.peers_of("node")) == len(hosts.peers_of("trainer")) == 1)
    assert hosts.peers_of("node") == {hosts.public_key_of("trainer"): f"{trainer}/32"}
    assert hosts.peers_of("trainer") == {hosts.public_key_of("node"): f"{node}/32"}

    serving = hosts.start_node("node", node)
    data_port = serving.addresses["data"].rpartition(":")[2]
    trained = hosts.train("trainer", trainer, "--steps=3")
    assert trained.returncode == 0, trained.stdout + trained.stderr

    ports = listening_ports(hosts, "node")
    assert data_port in ports
    assert len(ports) > 3, "the data plane's listener, UCX's own port, health and metrics"
    assert data_port in answering(hosts, "trainer", node, ports)
    lan = hosts.network.hosts["node"].address
    open_to_all = {serving.addresses[name].rpartition(":")[2] for name in ("health", "metrics")}
    assert set(answering(hosts, "stranger", lan, ports)) <= open_to_all
    hosts.pretend("stranger", trainer, to="node", at=node)
    assert answering(hosts, "stranger", node, ports) == []

    _ends(member)
    eventually(lambda: hosts.peers_of("node") == {})


def test_members_stay_through_a_restart_of_the_control_plane_and_see_no_other_tenant(
    hosts: Tunnelled,
) -> None:
    control_plane = hosts.start_control_plane()
    members = [
        hosts.join("node", Role.SERVER),
        hosts.join("trainer", Role.TRAINER, tenant="one"),
        hosts.join("tenant", Role.TRAINER, tenant="two"),
    ]
    node, one, two = keys = [hosts.public_key_of(host) for host in ("node", "trainer", "tenant")]
    allowed = dict(zip(keys, (f"{each.addresses['address']}/32" for each in members), strict=True))

    def seen() -> list[dict[str, str]]:
        return [hosts.peers_of(host) for host in ("node", "trainer", "tenant")]

    expected = [{key: allowed[key] for key in others} for others in ((one, two), (node,), (node,))]
    eventually(lambda: seen() == expected)
    control_plane.kill()
    eventually(lambda: all("is away" in each.log.read_text() for each in members))
    assert seen() == expected
    hosts.start_control_plane()
    eventually(
        lambda: all(each.log.read_text().count("in the data network") == 2 for each in members)
    )
    # Longer than the control plane takes to know everybody.
    time.sleep(2 * LEASE_SECONDS)
    assert seen() == expected
    members[2].kill()
    eventually(lambda: hosts.peers_of("node") == {one: allowed[one]})
    # The next one takes the place of what the killed one has left.
    members[2] = hosts.join("tenant", Role.TRAINER, "--replace", tenant="two")
    again = {hosts.public_key_of("tenant"): f"{members[2].addresses['address']}/32"}
    eventually(lambda: hosts.peers_of("node") == {one: allowed[one]} | again)
    for member in members:
        _ends(member)
    assert hosts.interface("node") not in hosts.run("node", "ip", "-brief", "link").stdout
    for log in hosts.folder.glob("wireguard-*.log"):
        assert "Traceback" not in log.read_text()


def _ends(process: Process) -> None:
    assert process.terminate() == 0, process.log.read_text()
