"""A control plane that hears nobody takes no leases away: it was stopped, or is cut off."""

from __future__ import annotations

from control_plane.jobs.isolation import IsolationDetector
from tests.service.control_plane.test_leases import n_servers
from tests.support.service_harness import (
    Client,
    TimedControlPlane,
    rank_manifest,
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
