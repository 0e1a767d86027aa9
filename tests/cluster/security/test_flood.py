"""A tenant trains on while another one, and strangers, ask for all that they can."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from distca.contract import rpc
from distca.contract.identity import Role
from tests.service.security.pki import Pki
from tests.service.security.secure_cluster import SecureCluster
from tests.service.security.test_cluster import manifests, team
from tests.support.service_harness import Client, client_of, job_spec, rank_manifest

pytestmark = pytest.mark.timeout(300)

STEPS = 4
WIDE = [[1] * 20_000, [20_000]]
"""A manifest that takes long to plan, and some hundred kilobytes."""

GARBAGE = (
    b"",
    b"\x00" * 4096,
    b"GET / HTTP/1.1\r\n",
    b"\x16\x03\x01\x40\x00" + b"\xff" * 2000,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 2000,
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, pki: Pki) -> Iterator[SecureCluster]:
    running = SecureCluster(tmp_path_factory.mktemp("flooded"), pki, lease_seconds=15.0)
    yield running
    running.close()


class Flood:
    """Repeats attacks on threads of their own until it is over; counts what they came to."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def add(self, attack: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._repeat, args=(attack,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(20.0)
            assert not thread.is_alive()

    def _repeat(self, attack: Callable[[], None]) -> None:
        while not self._over.wait(0.01):
            try:
                attack()
                self.outcomes["done"] += 1
            except (rpc.RpcError, OSError) as error:
                self.outcomes[type(error).__name__] += 1


@contextmanager
def flood() -> Iterator[Flood]:
    running = Flood()
    try:
        yield running
    finally:
        running.close()


class Greedy:
    """A tenant with a good certificate that opens jobs, and hands in manifests of each."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._n_jobs = 0
        self._step = 0
        self._jobs: list[tuple[str, str]] = []

    def open_job(self) -> None:
        self._n_jobs += 1
        self._jobs.append(self._client.open(0, job_spec(f"greedy-{self._n_jobs}", n_ranks=1)))

    def submit(self) -> None:
        self._step += 1
        for job, lease in self._jobs[-8:]:
            self._client.submit(job, lease, rank_manifest(self._step, 0, lengths=WIDE))

    def watch(self) -> None:
        for job, lease in self._jobs[-2:]:
            self._client.watch_rank(job, lease)


class Strangers:
    """Connect to a port, say nothing or nonsense, and stay."""

    def __init__(self, stack: ExitStack, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address = (host, int(port))
        self._stack = stack
        self._n = 0

    def connect(self) -> None:
        self._n += 1
        if self._n > 300:
            return
        connection = self._stack.enter_context(socket.create_connection(self._address, 5.0))
        with contextlib.suppress(ConnectionError):
            connection.sendall(GARBAGE[self._n % len(GARBAGE)])


def test_a_tenant_trains_on(cluster: SecureCluster, pki: Pki) -> None:
    files = pki.issue(Role.TRAINER, "greedy")
    ports = [
        address
        for process in cluster.processes
        for name, address in process.addresses.items()
        if name in ("grpc", "metrics", "health")
    ]
    with (
        team(cluster, placement="pool") as trains,
        client_of(cluster.address, call_seconds=5.0, **files.for_client()) as client,
        ExitStack() as stack,
    ):
        trains.check(manifests())
        with flood() as attacks:
            greedy = Greedy(client)
            for attack in (greedy.open_job, greedy.submit, greedy.watch):
                attacks.add(attack)
            for address in ports:
                if address is not None and address != cluster.node.addresses.get("data"):
                    attacks.add(Strangers(stack, address).connect)
            for seed in range(1, STEPS + 1):
                result = trains.check(manifests(), seed=seed)
                assert [running.recoveries for running in result.running] == [0, 0]
        assert attacks.outcomes["done"] > 50
        trains.check(manifests(), seed=STEPS + 1)
    assert all(process.popen.poll() is None for process in cluster.processes)
