"""A control plane that dies and comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.chaos.faults import BACK_SECONDS, REJOIN_SECONDS, kill_and_restart
from tests.cluster.chaos.processes import Job, JobSettings
from tests.cluster.chaos.scenario import References, disturbed

SHORT = JobSettings(steps=60, n_nodes=2)
LONG = JobSettings(steps=200)


@pytest.mark.timeout(600)
def test_killed_and_restarted(tmp_path: Path, references: References) -> None:
    """And a node dies while nobody is there to plan without it."""
    with disturbed(Job(tmp_path, SHORT), references, seed=1) as disturbance:
        disturbance.wait_for_step(10)
        kill_and_restart(disturbance)
        disturbance.wait_for_step(30)
        disturbance.note("killed the control plane and node-1", BACK_SECONDS)
        for name in ("control-plane", "node-1"):
            disturbance.job.processes[name].kill()
        disturbance.job.start_control_plane()
        disturbance.note("the control plane is back", REJOIN_SECONDS)


@pytest.mark.timeout(1800)
def test_killed_and_restarted_twenty_times(tmp_path: Path, references: References) -> None:
    with disturbed(Job(tmp_path, LONG), references, seed=2) as disturbance:
        for number in range(20):
            disturbance.wait_for_step(2 + 9 * number)
            disturbance.pause(disturbance.rng.uniform(0.0, 0.3))
            kill_and_restart(disturbance)


@pytest.mark.timeout(1200)
def test_killed_while_planning(tmp_path: Path, references: References) -> None:
    """Every plan takes longer than a step, so one is being made at any time."""
    settings = JobSettings(steps=60, n_nodes=2, planning_seconds=0.5)
    with disturbed(Job(tmp_path, settings), references, seed=3) as disturbance:
        for step in (5, 25, 45):
            disturbance.wait_for_step(step)
            disturbance.pause(disturbance.rng.uniform(0.0, 0.5))
            kill_and_restart(disturbance)


@pytest.mark.timeout(1200)
def test_killed_while_publishing(tmp_path: Path, references: References) -> None:
    """One rank gets a plan, and no other member does."""
    with disturbed(Job(tmp_path, SHORT), references, seed=4) as disturbance:
        disturbance.wait_for_step(5)
        kill_and_restart(disturbance, die_publishing=3)
        for plans in (1, 8, 0):
            process = disturbance.job.processes["control-plane"]
            while process.alive:
                assert disturbance.pause(0.02), "the run ended before it died"
            disturbance.note("the control plane died while publishing", BACK_SECONDS)
            disturbance.job.start_control_plane(die_publishing=plans)
            disturbance.note("the control plane is back", REJOIN_SECONDS)


@pytest.mark.timeout(900)
def test_away_for_longer_than_a_lease(tmp_path: Path, references: References) -> None:
    with disturbed(Job(tmp_path, SHORT), references, seed=5) as disturbance:
        disturbance.wait_for_step(20)
        disturbance.note("killed the control plane", 25.0 + BACK_SECONDS)
        disturbance.job.processes["control-plane"].kill()
        disturbance.pause(25.0)
        disturbance.job.start_control_plane()
