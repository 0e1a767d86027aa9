"""A tenant that asks for all that it may have costs its neighbours neither time nor memory."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest

from core_attention.manifest import RankManifest
from distca.contract.identity import Role
from tests import ROOT
from tests.service.security.pki import Pki
from tests.service.security.secure_cluster import SecureCluster
from tests.service.security.test_cluster import team

pytestmark = pytest.mark.timeout(400)

LENGTHS = [[[1500, 1000], [2500]], [[2500], [900, 1600]]]
"""Documents of two ranks in two nano-batches: a step takes some tenths of a second."""

CALM_STEPS = 10
NOISY_SECONDS = 30.0
"""How long the neighbour trains on after the noisy tenant has handed in all it may."""

LEAVE_SECONDS = 20.0
"""Memory is back so long after a tenant has left."""


class NoisyTenant:
    """The process of a tenant with a good certificate, which has opened its jobs."""

    def __init__(self, address: str, pki: Pki) -> None:
        files = pki.issue(Role.TRAINER, "noisy")
        arguments = (address, files.ca_file, files.certificate_file, files.key_file)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.security.noisy_tenant", *map(str, arguments)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready"
        self._outcome = ThreadPoolExecutor(1)

    def hand_in_all(self) -> Future[tuple[int, int]]:
        """Has it hand in all it may: how many manifests, and of how many documents a nano-batch."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._outcome.submit(self._handed_in)

    def leave(self) -> None:
        """Has it close its jobs and end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60.0) == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._outcome.shutdown()

    def _handed_in(self) -> tuple[int, int]:
        n, documents = map(int, self._read().split())
        return n, documents

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, pki: Pki) -> Iterator[SecureCluster]:
    running = SecureCluster(tmp_path_factory.mktemp("noisy"), pki, lease_seconds=15.0)
    yield running
    running.close()


@contextmanager
def noisy_tenant(cluster: SecureCluster, pki: Pki) -> Iterator[NoisyTenant]:
    tenant = NoisyTenant(cluster.address, pki)
    try:
        yield tenant
    finally:
        tenant.kill()


def memory_of(pid: int) -> float:
    """MiB that a process and those that it has started hold."""
    process = psutil.Process(pid)
    total = 0
    for each in (process, *process.children(recursive=True)):
        try:
            total += each.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


def test_a_job_beside_a_noisy_tenant_goes_on_and_memory_returns(
    cluster: SecureCluster, pki: Pki
) -> None:
    pid, node_pid = (process.popen.pid for process in cluster.processes)
    manifests = [RankManifest.from_lengths(0, rank, LENGTHS[rank]) for rank in range(2)]
    with team(cluster, placement="pool") as trains:

        def step() -> float:
            began = time.monotonic()
            trains.run(manifests)
            return time.monotonic() - began

        with noisy_tenant(cluster, pki) as noisy:
            for _ in range(3):
                step()
            calm = [step() for _ in range(CALM_STEPS)]
            before, node_before = memory_of(pid), memory_of(node_pid)
            beside, most = [], 0.0
            outcome, until = noisy.hand_in_all(), math.inf
            while time.monotonic() < until:
                beside.append(step())
                most = max(most, memory_of(pid))
                if outcome.done() and until == math.inf:
                    until = time.monotonic() + NOISY_SECONDS
            noisy.leave()
        handed_in, documents = outcome.result()
        deadline = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < deadline:
            step()
            after, node_after = memory_of(pid), memory_of(node_pid)
            if after <= 1.1 * before and node_after <= 1.1 * node_before:
                break
    shown = (
        f"calm steps took {min(calm):.2f} to {max(calm):.2f} s, beside {handed_in} manifests of "
        f"2 x {documents} documents {min(beside):.2f} to {max(beside):.2f} s; MiB of the control "
        f"plane {before:.0f}, at most {most:.0f}, then {after:.0f}; of the node {node_before:.0f}, "
        f"then {node_after:.0f}"
    )
    print(shown)
    assert handed_in > 5, shown
    assert max(beside) <= 3 * max(calm), shown
    assert after <= 1.1 * before, shown
    assert node_after <= 1.1 * node_before, shown
