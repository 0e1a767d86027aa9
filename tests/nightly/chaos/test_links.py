"""Hosts in network namespaces, and links between them that are cut, unplugged, lossy or slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.chaos.faults import cut, needs_links, on_a_switch
from tests.cluster.chaos.hosts import Direction, Network
from tests.cluster.chaos.processes import JobSettings
from tests.cluster.chaos.scenario import STOPPED_SECONDS, Disturbance, References, disturbed

pytestmark = needs_links

SHORT = JobSettings(steps=60, n_nodes=3)
SLOW = JobSettings(steps=20, n_nodes=3)
NODE = "node-1"


@contextmanager
def switched(
    folder: Path, settings: JobSettings, references: References, seed: int, **more: Any
) -> Iterator[tuple[Network, Disturbance]]:
    """A run, disturbed, whose every process has a host of its own."""
    with (
        on_a_switch(folder, settings, **more) as (links, job),
        disturbed(job, references, seed) as disturbance,
    ):
        yield links, disturbance


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("direction", "seed"), [(Direction.BOTH, 1), (Direction.IN, 2), (Direction.OUT, 2)]
)
def test_a_link_that_is_cut_for_ever(
    tmp_path: Path, references: References, direction: Direction, seed: int
) -> None:
    with switched(tmp_path, SHORT, references, seed) as (links, disturbance):
        disturbance.wait_for_step(10)
        cut(links, disturbance, NODE, direction)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [1.0, 10.0])
def test_a_link_that_is_cut_for_a_while(
    tmp_path: Path, references: References, seconds: float
) -> None:
    with switched(tmp_path, SHORT, references, 3) as (links, disturbance):
        for after in (5, 25):
            disturbance.wait_for_step(after)
            cut(links, disturbance, NODE)
            disturbance.pause(seconds)
            links.heal(NODE)


@pytest.mark.timeout(900)
def test_an_unplugged_cable(tmp_path: Path, references: References) -> None:
    with switched(tmp_path, SHORT, references, 4) as (links, disturbance):
        disturbance.wait_for_step(10)
        disturbance.note(f"unplugged {NODE}", STOPPED_SECONDS)
        links.unplug(NODE)
        disturbance.pause(20.0)
        links.heal(NODE)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [10.0, 20.0])
def test_the_control_plane_is_cut_off(
    tmp_path: Path, references: References, seconds: float
) -> None:
    """Training goes on with the plans that are there, and then waits."""
    with switched(tmp_path, SHORT, references, 5) as (links, disturbance):
        disturbance.wait_for_step(10)
        disturbance.note("cut the control plane off", seconds + 15.0)
        links.cut("control-plane")
        disturbance.pause(seconds)
        links.heal("control-plane")


def lossy(links: Network) -> None:
    links.lose(NODE, 0.05)


def slow(links: Network) -> None:
    links.delay(NODE, 0.1)


def narrow(links: Network) -> None:
    links.limit(NODE, 10_000_000)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("worsen", [lossy, slow, narrow], ids=lambda worsen: worsen.__name__)
def test_a_bad_link(
    tmp_path: Path, references: References, worsen: Callable[[Network], None]
) -> None:
    """5% of all packets lost, 100 ms delay each way, or 10 Mbit/s: slower, and nothing breaks."""
    with switched(tmp_path, SLOW, references, 6, slow_cables=(NODE,)) as (links, disturbance):
        disturbance.wait_for_step(3)
        disturbance.note(f"a {worsen.__name__} link", STOPPED_SECONDS)
        worsen(links)
