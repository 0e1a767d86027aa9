"""A control plane that hears nobody takes no leases away: it was stopped, or is cut off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from control_plane.jobs.isolation import IsolationDetector
from distca.contract import rpc
from tests.service.control_plane.test_leases import n_servers
from tests.support.errors import fails
from tests.support.service_harness import (
    Client,
    TimedControlPlane,
    client_of,
    rank_manifest,
    running,
)

LEASE_SECONDS = 30.0
"""As in the harness."""


def test_silence_of_several_is_deafness_and_of_one_is_its_end() -> None:
    detector = IsolationDetector(lease_seconds=10.0, now=100.0)
    assert not detector.is_isolated(3, now=105.0)
    assert detector.is_isolated(3, now=105.1)
    assert not detector.is_isolated(1, now=200.0)
    assert detector.heard(now=104.0) == 0.0
    assert detector.heard(now=120.0) == 16.0
    assert not detector.is_isolated(3, now=121.0)


@pytest.fixture
def control_plane() -> Iterator[TimedControlPlane]:
    with running() as control_plane:
        yield control_plane


@pytest.fixture
def client(control_plane: TimedControlPlane) -> Iterator[Client]:
    with client_of(control_plane.address) as client:
        yield client


def test_leases_begin_anew_when_somebody_is_heard_again(
    control_plane: TimedControlPlane, client: Client
) -> None:
    """Two servers and a job's two ranks are silent for three leases; then they call again."""
    servers = [client.register(f"s{index}") for index in range(2)]
    ranks = [client.open(rank) for rank in range(2)]
    control_plane.pass_time(3 * LEASE_SECONDS)
    assert n_servers(client) == 2
    client.heartbeat(servers[0])
    # The others had no chance to be first.
    control_plane.pass_time(0.9 * LEASE_SECONDS)
    for lease in servers:
        client.heartbeat(lease)
    for rank, (job, lease) in enumerate(ranks):
        client.submit(job, lease, rank_manifest(0, rank))


def test_one_that_stays_silent_loses_its_lease_while_others_are_heard(
    control_plane: TimedControlPlane, client: Client
) -> None:
    heard, silent = client.register("s0"), client.register("s1")
    control_plane.pass_time(2 * LEASE_SECONDS)
    # The silence of both is this process's own; that of one, while the other calls, is its end.
    for _ in range(4):
        client.heartbeat(heard)
        control_plane.pass_time(LEASE_SECONDS / 3)
    assert n_servers(client) == 1
    with fails(rpc.Reason.FENCED):
        client.heartbeat(silent)
