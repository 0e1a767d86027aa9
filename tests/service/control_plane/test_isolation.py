"""A control plane that hears nobody takes no leases away: it was stopped, or is cut off."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from control_plane.jobs.isolation import IsolationDetector
from control_plane.server import ControlPlane
from distca.contract import rpc
from tests.service.control_plane.test_leases import n_servers
from tests.support.service_harness import (
    Client,
    client_of,
    eventually,
    rank_manifest,
    running,
)

LEASE_SECONDS = 0.6


def test_silence_of_several_is_deafness_and_of_one_is_its_end() -> None:
    detector = IsolationDetector(lease_seconds=10.0, now=100.0)
    assert not detector.is_isolated(3, now=105.0)
    assert detector.is_isolated(3, now=105.1)
    assert not detector.is_isolated(1, now=200.0)
    assert detector.heard(now=104.0) == 0.0
    assert detector.heard(now=120.0) == 16.0
    assert not detector.is_isolated(3, now=121.0)


@pytest.fixture
def control_plane() -> Iterator[ControlPlane]:
    with running(coordinator={"lease_seconds": LEASE_SECONDS}) as control_plane:
        yield control_plane


@pytest.fixture
def client(control_plane: ControlPlane) -> Iterator[Client]:
    with client_of(control_plane.address) as client:
        yield client


def test_leases_begin_anew_when_somebody_is_heard_again(client: Client) -> None:
    """Two servers and a job's two ranks are silent for three leases; then they call again."""
    servers = [client.register(f"s{index}") for index in range(2)]
    ranks = [client.open(rank) for rank in range(2)]
    time.sleep(3 * LEASE_SECONDS)
    assert n_servers(client) == 2
    client.heartbeat(servers[0])
    # The others had no chance to be first.
    time.sleep(LEASE_SECONDS / 3)
    for lease in servers:
        client.heartbeat(lease)
    for rank, (job, lease) in enumerate(ranks):
        client.submit(job, lease, rank_manifest(0, rank))


def test_one_that_stays_silent_loses_its_lease_while_others_are_heard(client: Client) -> None:
    heard, silent = client.register("s0"), client.register("s1")
    time.sleep(2 * LEASE_SECONDS)

    def only_one_left() -> bool:
        client.heartbeat(heard)
        return n_servers(client) == 1

    eventually(only_one_left)
    with pytest.raises(rpc.LeaseExpired):
        client.heartbeat(silent)
