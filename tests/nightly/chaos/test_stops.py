"""Processes that are stopped (SIGSTOP) for a while or for ever: they answer nothing, and no
connection of theirs breaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.chaos.processes import Job, JobSettings
from tests.cluster.chaos.scenario import References, disturbed

SHORT = JobSettings(steps=60, n_nodes=3)


@pytest.mark.timeout(600)
def test_a_node_that_is_stopped_for_ever(tmp_path: Path, references: References) -> None:
    with disturbed(Job(tmp_path, SHORT), references, seed=2) as disturbance:
        disturbance.wait_for_step(10)
        disturbance.stop("node-1")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [1.0, 10.0])
def test_a_node_that_is_stopped_for_a_while(
    tmp_path: Path, references: References, seconds: float
) -> None:
    with disturbed(Job(tmp_path, SHORT), references, seed=3) as disturbance:
        for after in (5, 25):
            disturbance.wait_for_step(after)
            node = disturbance.random_node()
            disturbance.stop(node)
            disturbance.pause(seconds)
            disturbance.go_on(node)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "seed"), [("control-plane", 4), ("trainer-1", 5)])
def test_another_process_stops_for_ten_seconds(
    tmp_path: Path, references: References, name: str, seed: int
) -> None:
    """Less than a trainer's lease: the others wait, and nobody is blamed for its silence."""
    with disturbed(Job(tmp_path, SHORT), references, seed) as disturbance:
        disturbance.wait_for_step(10)
        disturbance.stop(name, bound_seconds=15.0)
        disturbance.pause(10.0)
        disturbance.go_on(name)
