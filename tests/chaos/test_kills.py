"""Attention nodes that die: one, two, all of them, again and again, at the worst moments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.processes import Job, JobSettings
from tests.chaos.scenario import Disturbance, References, disturbed

SHORT = JobSettings(steps=60, n_nodes=3)
LONG = JobSettings(steps=200)
BACK_SECONDS = 3.0
"""After so long a node that died is started again."""


def restart_node(disturbance: Disturbance, name: str) -> None:
    disturbance.job.start_node(int(name.removeprefix("node-")))


def kill_again_and_again(disturbance: Disturbance) -> None:
    """Every few seconds a node dies; each comes back after a while."""
    while disturbance.pause(disturbance.rng.uniform(1.0, 4.0)):
        if len([node for node in disturbance.job.nodes if node.serving]) < 2:
            continue
        name = disturbance.random_node()
        disturbance.kill(name)
        disturbance.pause(BACK_SECONDS)
        restart_node(disturbance, name)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_in_the_middle_of_a_pass(tmp_path: Path, references: References) -> None:
    """In the short form too: forward, backward, two at once, and all that are left."""
    with disturbed(Job(tmp_path, SHORT), references, seed=1) as disturbance:
        disturbance.wait_for_tick(backward=False, after_step=4)
        disturbance.kill("node-0")
        disturbance.wait_for_tick(backward=True, after_step=8)
        disturbance.kill("node-1")
        restart_node(disturbance, "node-0")
        restart_node(disturbance, "node-1")
        disturbance.wait_for_step(30)
        disturbance.kill(*[node.name for node in disturbance.job.nodes])


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(3))
def test_a_random_node_every_few_seconds(tmp_path: Path, references: References, seed: int) -> None:
    with disturbed(Job(tmp_path, LONG), references, seed) as disturbance:
        kill_again_and_again(disturbance)
