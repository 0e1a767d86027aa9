"""Bytes of strangers at every port that policies leave open: processes live on, and a job that runs
meanwhile computes the same bits.

The data plane's two ports are not among them. UCX's wire format trusts its peers: few bytes at its
listener, and fewer at the port that it opens besides, end a process, and so nobody must reach them.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress

import psutil
import pytest
import torch

from core_attention.manifest import RankManifest
from data_plane.transport import Address, HandshakeRejected
from data_plane.ucxx_settings import UcxxSettings
from data_plane.ucxx_transport import UcxxTransport
from distca.rpc_errors import RpcError
from distca.v1 import membership_pb2
from tests.addresses import foreign_address
from tests.cluster import NODE_SHAPE, Cluster, Process, cluster
from tests.control_plane.service_harness import client_of
from tests.fuzz.mutation import mutated_bytes, random_bytes
from tests.security.recording_proxy import recording
from tests.team import StepResult, Team

pytestmark = [pytest.mark.slow, pytest.mark.faults]

MUTATIONS = int(os.environ.get("DISTCA_WIRE_MUTATIONS", "1000"))
"""Inputs in all, spread over the ports."""

_ANSWER_SECONDS = 10.0
_BETWEEN_STEPS_SECONDS = 0.5
"""Leaves the processors to the attack."""
_UCX_MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
_DEADLY_IDS = (7, 8, 9, 10, 11, 12, 15, 16)
"""Ids of messages of which UCX 1.21 may read a header that is not there."""
_ADDRESS_VERSION_AT = 25
"""Where a client's first message to the listener has the version of its UCX address."""
_FIRST_MESSAGE_HEADER_BYTES = 16


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("garbage"), 1) as started:
        yield started


def open_ports(cluster: Cluster) -> dict[str, tuple[str, int]]:
    """Ports that strangers may reach, by what they are."""
    control_plane, node = cluster.processes
    return {
        f"{process.name} {name}": _host_and_port(process.addresses[name])
        for process, names in ((control_plane, ("grpc", "metrics")), (node, ("health", "metrics")))
        for name in names
    }


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _talk(name: str, port: int) -> None:
    """Says what a client says at such a port."""
    if name.endswith("metrics"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_ANSWER_SECONDS).read()
        return
    with client_of(f"127.0.0.1:{port}") as client, suppress(RpcError):
        # A node's health port knows no such call, and answers so. Nothing that changes what the job
        # runs on: without certificates, a mutation that can still be read may do that.
        client.membership.ListServers(membership_pb2.ListServersRequest())


def recorded_hello(target: tuple[str, int]) -> bytes:
    """What a member's UCX sends to a listener first."""
    with (
        recording(target) as proxy,
        closing(UcxxTransport(UcxxSettings(data_host="127.0.0.1"))) as transport,
    ):
        with pytest.raises(HandshakeRejected):
            transport.connect(
                Address("127.0.0.1", proxy.port), b"nobody", _ANSWER_SECONDS, secret=bytes(36)
            )
        (recorded,) = proxy.recorded()
        return recorded


def recorded_traffic(cluster: Cluster) -> dict[str, list[bytes]]:
    """What real clients sent to each port."""
    found = {}
    for name, target in open_ports(cluster).items():
        with recording(target) as proxy:
            _talk(name, proxy.port)
            found[name] = proxy.recorded()
        assert found[name], f"nothing was recorded at {name}"
    return found


def send(target: tuple[str, int], raw: bytes, linger_seconds: float = 0.0) -> None:
    """Sends bytes and goes, whatever the answer."""
    with _connected(target) as line, suppress(OSError):
        line.sendall(raw)
        time.sleep(linger_seconds)


def _connected(target: tuple[str, int]) -> socket.socket:
    """A connection, once the port answers: a control plane's may be away for a moment, after a call
    that gRPC cannot take."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    while True:
        try:
            return socket.create_connection(target, _ANSWER_SECONDS)
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def thirteen_bytes(message_id: int) -> bytes:
    """UCX's magic, a message's id, and a length of 0."""
    return _UCX_MAGIC + struct.pack("<BI", message_id, 0)


def attack(cluster: Cluster, traffic: dict[str, list[bytes]], seed: int) -> int:
    """Mutations of ``traffic``, random bytes, and the 13 bytes, at every port; returns how many."""
    rng = random.Random(seed)
    ports = open_ports(cluster)
    sent = 0
    for name, target in ports.items():
        for message_id in (0, _DEADLY_IDS[0], 255):
            send(target, thirteen_bytes(message_id), linger_seconds=0.01)
        for _ in range(MUTATIONS // len(ports)):
            raw = mutated_bytes(rng.choice(traffic[name]), rng)
            send(target, raw if rng.random() < 0.9 else random_bytes(rng, 2000))
            sent += 1
    return sent


def test_a_job_computes_the_same_bits_while_strangers_send_garbage(running: Cluster) -> None:
    traffic = recorded_traffic(running)
    pids = [process.popen.pid for process in running.processes]
    manifests = [RankManifest.from_lengths(0, 0, [[40, 9], [64]])]
    with Team(running, 1, NODE_SHAPE, placement="pool", planner="steady") as team:
        undisturbed = team.run(manifests)
        sent: list[int] = []
        stranger = threading.Thread(target=lambda: sent.append(attack(running, traffic, seed=1)))
        stranger.start()
        steps = [team.run(manifests)]
        while stranger.is_alive():
            steps.append(team.run(manifests))
            stranger.join(_BETWEEN_STEPS_SECONDS)
        stranger.join()
        steps.append(team.run(manifests))
    assert sent, "the attack broke off"
    assert sent[0] == MUTATIONS // 4 * 4
    for step in steps:
        assert_same_bits(step, undisturbed)
    assert [
        process.popen.pid for process in running.processes if process.popen.poll() is None
    ] == pids


def assert_same_bits(step: StepResult, expected: StepResult) -> None:
    for place, rows in expected.rows.items():
        for name, tensor in rows.items():
            assert torch.equal(step.rows[place][name], tensor), f"{name} of {place} differs"


def ucx_port(process: Process) -> tuple[str, int]:
    """Where UCX itself listens, besides what the process tells of."""
    known = {_host_and_port(process.addresses[name])[1] for name in ("data", "health", "metrics")}
    (found,) = {
        (each.laddr.ip, each.laddr.port)
        for each in psutil.Process(process.popen.pid).net_connections("inet")
        if each.status == psutil.CONN_LISTEN and each.laddr.port not in known
    }
    return found


@pytest.fixture
def victim(running: Cluster) -> Process:
    """A node, to be ended."""
    return running.start_node(f"victim-{len(running.processes)}")


def test_data_ports_take_connections_that_send_nothing_and_random_bytes(victim: Process) -> None:
    rng = random.Random(2)
    for target in (_host_and_port(victim.addresses["data"]), ucx_port(victim)):
        for _ in range(100):
            # What distca doctor does.
            send(target, b"")
            send(target, random_bytes(rng, 500))
    assert victim.popen.poll() is None


def test_ucx_own_port_is_open_at_the_data_address_alone(victim: Process) -> None:
    host, port = ucx_port(victim)
    assert host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((foreign_address(), port), _ANSWER_SECONDS)


def test_what_may_end_a_node_costs_no_step(running: Cluster, victim: Process) -> None:
    """Whether these bytes end a process depends on its UCX, and on what lies in its memory."""
    data = _host_and_port(victim.addresses["data"])
    hello = bytearray(recorded_hello(data))
    hello[_ADDRESS_VERSION_AT] = 2
    (length,) = struct.unpack_from("<Q", hello)
    # Without what the client said when it was answered.
    deadly = bytes(hello[: _FIRST_MESSAGE_HEADER_BYTES + length])
    manifests = [RankManifest.from_lengths(0, rank, [[40, 9], [64]]) for rank in range(2)]
    with Team(running, 2, NODE_SHAPE, placement="pool", planner="steady") as team:
        team.check(manifests)
        own = ucx_port(victim)
        for message_id in _DEADLY_IDS:
            with suppress(ConnectionError):
                socket.create_connection(own, _ANSWER_SECONDS).sendall(thirteen_bytes(message_id))
        team.check(manifests, seed=1)
        with suppress(ConnectionError):
            socket.create_connection(data, _ANSWER_SECONDS).sendall(deadly)
        for seed in (2, 3):
            team.check(manifests, seed=seed)
