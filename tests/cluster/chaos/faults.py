"""Faults that several schedules of chaos make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.chaos.hosts import Direction, Network, network, why_no_namespaces
from tests.cluster.chaos.processes import Job, JobSettings
from tests.cluster.chaos.scenario import STOPPED_SECONDS, Disturbance

BACK_SECONDS = 60.0
"""Without plans a rank waits for the control plane, which takes long to start on a busy machine;
once it serves, the rank's backoff and the time that servers get to register are bounded below."""

REJOIN_SECONDS = 20.0

DRAIN_SECONDS = 30.0

_WHY_NOT = why_no_namespaces()
needs_links = pytest.mark.skipif(_WHY_NOT is not None, reason=f"no network namespaces: {_WHY_NOT}")


def kill_and_restart(disturbance: Disturbance, *, die_publishing: int = 0) -> None:
    """The control plane."""
    disturbance.note("killed the control plane", BACK_SECONDS)
    disturbance.job.processes["control-plane"].kill()
    disturbance.job.start_control_plane(die_publishing=die_publishing)
    disturbance.note("the control plane is back", REJOIN_SECONDS)


def serving(disturbance: Disturbance) -> list[str]:
    """The nodes that serve."""
    return [node.name for node in disturbance.job.nodes if node.serving]


@contextmanager
def on_a_switch(
    folder: Path, settings: JobSettings, *, slow_cables: tuple[str, ...] = ()
) -> Iterator[tuple[Network, Job]]:
    """A job whose every process has a host of its own."""
    names = ["control-plane"]
    names += [f"node-{index}" for index in range(settings.n_nodes)]
    names += [f"trainer-{rank}" for rank in range(settings.n_trainers)]
    with network(names, slow_cables=slow_cables) as links:
        yield links, Job(folder, settings, hosts=links.hosts)


def cut(
    links: Network, disturbance: Disturbance, host: str, direction: Direction = Direction.BOTH
) -> None:
    disturbance.note(f"cut the link of {host} ({direction})", STOPPED_SECONDS)
    links.cut(host, direction)
