"""Bytes of strangers at every port that policies leave open, with TLS and without: processes live
on, and a job that runs meanwhile computes the same bits.

The data plane's two ports are not among them. UCX's wire format trusts its peers: few bytes at its
listener, and fewer at the port that it opens besides, end a process, and so nobody must reach them.
"""

from __future__ import annotations

import os
import random
import socket
import ssl
import struct
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from typing import Any

import psutil
import pytest
import torch

from core_attention.manifest import RankManifest
from data_plane.transport import Address, HandshakeRejected
from data_plane.ucxx.settings import UcxxSettings
from data_plane.ucxx.transport import UcxxTransport
from distca.contract.identity import Role
from distca.contract.rpc_errors import RpcError
from distca.v1 import cluster_pb2
from tests.service.fuzz.mutation import mutated_bytes, random_bytes
from tests.service.security.pki import Files, Pki
from tests.service.security.recording_proxy import recording
from tests.service.security.secure_cluster import SecureCluster
from tests.service.security.test_cluster import manifests, team
from tests.support.cluster import NODE_SHAPE, Cluster, Process, cluster
from tests.support.service_harness import client_of
from tests.support.team import StepResult, Team

MUTATIONS = int(os.environ.get("DISTCA_WIRE_MUTATIONS", "1000"))
"""Inputs at each port."""

LINES = 5
"""At each port side by side: most of the time they wait for answers that do not come."""

_ANSWER_SECONDS = 10.0
_LEAVE_SECONDS = 0.2
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
        for process, names in ((control_plane, ("grpc", "metrics")), (node, ("metrics",)))
        for name in names
    }


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory, pki: Pki) -> Iterator[SecureCluster]:
    started = SecureCluster(tmp_path_factory.mktemp("secure"), pki, lease_seconds=15.0)
    yield started
    started.close()


def _talk(name: str, port: int, tls: Mapping[str, Any] | None = None) -> None:
    """Says what a client says at such a port."""
    if name.endswith("metrics"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_ANSWER_SECONDS).read()
        return
    with client_of(f"127.0.0.1:{port}", **(tls or {})) as client, suppress(RpcError):
        # Nothing that changes what the job runs on: without certificates, a mutation that can still
        # be read may do that.
        client.cluster.DescribeCluster(cluster_pb2.DescribeClusterRequest())


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


def recorded_traffic(
    ports: Mapping[str, tuple[str, int]], tls: Mapping[str, Any] | None = None
) -> dict[str, list[bytes]]:
    """What real clients sent to each port."""
    found = {}
    for name, target in ports.items():
        with recording(target) as proxy:
            _talk(name, proxy.port, tls)
            found[name] = proxy.recorded()
        assert found[name], f"nothing was recorded at {name}"
    return found


def send(target: tuple[str, int], raw: bytes) -> None:
    """Sends bytes, and goes once they have been read, whatever the answer."""
    with socket.create_connection(target, _ANSWER_SECONDS) as line, suppress(OSError):
        line.sendall(raw)
        _leave(line)


def _leave(line: socket.socket) -> None:
    # To close with an answer unread would take back what was sent.
    line.shutdown(socket.SHUT_WR)
    line.settimeout(_LEAVE_SECONDS)
    while line.recv(2**16):
        pass


def thirteen_bytes(message_id: int) -> bytes:
    """UCX's magic, a message's id, and a length of 0."""
    return _UCX_MAGIC + struct.pack("<BI", message_id, 0)


Send = Callable[[bytes], None]


def attack(send: Send, traffic: list[bytes], count: int, seed: str) -> int:
    """Mutations of ``traffic`` and random bytes; returns how many."""
    rng = random.Random(seed)
    for _ in range(count):
        raw = mutated_bytes(rng.choice(traffic), rng)
        send(raw if rng.random() < 0.9 else random_bytes(rng, 2000))
    return count


class Attacks:
    """Run side by side, each on a thread, until all have ended."""

    def __init__(self, pool: ThreadPoolExecutor, attacks: list[Callable[[], int]]) -> None:
        self._futures = [pool.submit(each) for each in attacks]

    @property
    def under_way(self) -> bool:
        return not all(future.done() for future in self._futures)

    def sent(self) -> int:
        """How many inputs; raises what broke an attack off."""
        return sum(future.result() for future in self._futures)


def test_a_job_computes_the_same_bits_while_strangers_send_garbage(running: Cluster) -> None:
    ports = open_ports(running)
    traffic = recorded_traffic(ports)
    pids = [process.popen.pid for process in running.processes]
    manifests = [RankManifest.from_lengths(0, 0, [[40, 9], [64]])]
    with (
        Team(running, 1, NODE_SHAPE, placement="pool", planner="steady") as team,
        ThreadPoolExecutor(LINES * len(ports)) as pool,
    ):
        undisturbed = team.run(manifests)
        for target in ports.values():
            for message_id in (0, _DEADLY_IDS[0], 255):
                send(target, thirteen_bytes(message_id))
        attacks = Attacks(
            pool,
            [
                partial(
                    attack, partial(send, target), traffic[name], MUTATIONS // LINES, f"{name} {n}"
                )
                for name, target in ports.items()
                for n in range(LINES)
            ],
        )
        steps = [team.run(manifests)]
        while attacks.under_way:
            steps.append(team.run(manifests))
            time.sleep(_BETWEEN_STEPS_SECONDS)
        steps.append(team.run(manifests))
    assert attacks.sent() == MUTATIONS // LINES * LINES * len(ports)
    for step in steps:
        assert_same_bits(step, undisturbed)
    assert [
        process.popen.pid for process in running.processes if process.popen.poll() is None
    ] == pids


def tls_ports(cluster: SecureCluster) -> dict[str, tuple[str, int]]:
    """Ports that ask for certificates, by what :func:`open_ports` calls them."""
    control_plane = cluster.processes[0]
    return {f"{control_plane.name} grpc": _host_and_port(control_plane.addresses["grpc"])}


class Insider:
    """Somebody who has a certificate.

    Attributes:
        handshakes: that have succeeded.
    """

    def __init__(self, target: tuple[str, int], files: Files) -> None:
        self._target = target
        self._context = ssl.create_default_context(cafile=str(files.ca_file))
        self._context.load_cert_chain(files.certificate_file, files.key_file)
        self._context.set_alpn_protocols(["h2"])
        self.handshakes = 0

    def send(self, raw: bytes) -> None:
        """Sends bytes inside TLS."""
        with (
            socket.create_connection(self._target, _ANSWER_SECONDS) as plain,
            suppress(OSError),
            self._context.wrap_socket(plain, server_hostname="localhost") as line,
        ):
            self.handshakes += 1
            line.sendall(raw)
            _leave(line)


def test_a_job_trains_on_while_garbage_comes_in_and_instead_of_tls(
    secure: SecureCluster, running: Cluster, pki: Pki
) -> None:
    """Half of it is mutated TLS; the other half mutated calls inside of TLS, by somebody who may
    look at everything and change nothing."""
    files = pki.issue(Role.READ_ONLY, "curious")
    ports = tls_ports(secure)
    outside = recorded_traffic(ports, files.for_client())
    inside = recorded_traffic({name: open_ports(running)[name] for name in ports})
    insiders = [
        (name, Insider(target, files)) for name, target in ports.items() for _ in range(LINES)
    ]
    each = MUTATIONS // 2 // LINES
    with team(secure, placement="pool") as trains, ThreadPoolExecutor(2 * len(insiders)) as pool:
        trains.check(manifests())
        attacks = Attacks(
            pool,
            [
                partial(attack, say, words, each, f"{name} {n}")
                for n, (name, insider) in enumerate(insiders)
                for say, words in (
                    (partial(send, ports[name]), outside[name]),
                    (insider.send, inside[name]),
                )
            ],
        )
        seed = 1
        while attacks.under_way:
            result = trains.check(manifests(), seed=seed)
            assert [step.recoveries for step in result.running] == [0, 0]
            seed += 1
            time.sleep(_BETWEEN_STEPS_SECONDS)
        trains.check(manifests(), seed=seed)
    assert attacks.sent() == 2 * each * len(insiders)
    assert [insider.handshakes for _, insider in insiders] == [each] * len(insiders)
    assert all(process.popen.poll() is None for process in secure.processes)
    # The ports take calls as before.
    assert recorded_traffic(ports, files.for_client())


def assert_same_bits(step: StepResult, expected: StepResult) -> None:
    for place, rows in expected.rows.items():
        for name, tensor in rows.items():
            assert torch.equal(step.rows[place][name], tensor), f"{name} of {place} differs"


def ucx_port(process: Process) -> tuple[str, int]:
    """Where UCX itself listens, besides what the process tells of."""
    known = {_host_and_port(process.addresses[name])[1] for name in ("data", "metrics")}
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
