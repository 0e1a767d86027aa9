"""Attention nodes that die: one, two, all of them, again and again, at the worst moments."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from control_plane.planner import DEFAULT_PLANNER
from tests.cluster.chaos.faults import DRAIN_SECONDS, serving
from tests.cluster.chaos.processes import Job, JobSettings
from tests.cluster.chaos.scenario import Disturbance, References, disturbed

SHORT = JobSettings(steps=60, n_nodes=3)
LONG = JobSettings(steps=200)
BACK_SECONDS = 3.0
"""After so long a node that died is started again."""


def start_again(disturbance: Disturbance, *names: str) -> None:
    for name in names:
        disturbance.job.start_node(int(name.removeprefix("node-")))


@pytest.mark.timeout(600)
def test_in_the_middle_of_a_pass(tmp_path: Path, references: References) -> None:
    """Forward, backward, and all that are left."""
    with disturbed(Job(tmp_path, SHORT), references, seed=1) as disturbance:
        disturbance.wait_for_tick(backward=False, after_step=4)
        disturbance.kill("node-0")
        disturbance.wait_for_tick(backward=True, after_step=8)
        disturbance.kill("node-1")
        disturbance.wait_for_step(30)
        disturbance.kill(*serving(disturbance))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(3))
def test_a_random_node_every_few_seconds(tmp_path: Path, references: References, seed: int) -> None:
    """Each is started again after a while; with the default planner in one of the runs."""
    settings = LONG if seed else JobSettings(steps=200, planner=DEFAULT_PLANNER)
    with disturbed(Job(tmp_path, settings), references, seed) as disturbance:
        while disturbance.pause(disturbance.rng.uniform(1.0, 4.0)):
            if len(serving(disturbance)) < 2:
                continue
            name = disturbance.random_node()
            disturbance.kill(name)
            disturbance.pause(BACK_SECONDS)
            start_again(disturbance, name)
        assert len(disturbance.faults) > 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_in_the_middle_of_one_phase_again_and_again(
    tmp_path: Path, references: References, backward: bool
) -> None:
    with disturbed(Job(tmp_path, LONG), references, seed=4 + backward) as disturbance:
        for step in (10, 70, 130):
            disturbance.wait_for_tick(backward=backward, after_step=step)
            name = disturbance.random_node()
            disturbance.kill(name)
            start_again(disturbance, name)


@pytest.mark.timeout(900)
def test_two_at_once(tmp_path: Path, references: References) -> None:
    with disturbed(Job(tmp_path, LONG), references, seed=6) as disturbance:
        for step in (10, 100):
            disturbance.wait_for_step(step)
            names = disturbance.rng.sample(sorted(serving(disturbance)), 2)
            disturbance.kill(*names)
            start_again(disturbance, *names)


@pytest.mark.timeout(900)
def test_one_more_during_a_recovery(tmp_path: Path, references: References) -> None:
    """The second one dies while the plans without the first one are made, sent and taken up."""
    with disturbed(Job(tmp_path, LONG), references, seed=7) as disturbance:
        for step, gap_seconds in ((10, 0.02), (70, 0.1), (130, 0.3)):
            disturbance.wait_for_step(step)
            names = disturbance.rng.sample(sorted(serving(disturbance)), 2)
            disturbance.kill(names[0])
            disturbance.pause(gap_seconds)
            disturbance.kill(names[1])
            start_again(disturbance, *names)


@pytest.mark.timeout(900)
def test_all_at_once_then_home_and_back(tmp_path: Path, references: References) -> None:
    """The trainers compute at home, and give their work to the pool again when it is back."""
    with disturbed(Job(tmp_path, LONG), references, seed=8) as disturbance:
        disturbance.wait_for_step(20)
        names = serving(disturbance)
        disturbance.kill(*names)
        at_home = disturbance.job.steps_begun
        disturbance.wait_for_step(at_home + 10)
        start_again(disturbance, *names)
        for name in names:
            disturbance.job.wait_until_serving(name)
        assert disturbance.job.training, "it ended before the pool was back"
    for name in names:
        log = disturbance.job.processes[name].log.read_text()
        since = log[log.rindex("registered at") :]
        assert "rank 0 connected" in since, f"{name} was not used again"


@pytest.mark.timeout(900)
def test_during_registration(tmp_path: Path, references: References) -> None:
    """A node is started and dies a moment before, while or after it registers."""
    with disturbed(Job(tmp_path, LONG), references, seed=9) as disturbance:
        for number in range(4):
            disturbance.wait_for_step(10 + 40 * number)
            node = disturbance.job.start_node(4)
            while disturbance.pause(0.005) and "listening" not in node.log.read_text():
                assert node.alive
            disturbance.pause(disturbance.rng.uniform(0.0, 0.5))
            disturbance.kill("node-4")
            node.log.write_text("")


@pytest.mark.timeout(900)
def test_during_a_drain(tmp_path: Path, references: References) -> None:
    with disturbed(Job(tmp_path, LONG), references, seed=10) as disturbance:
        for step, gap_seconds in ((10, 0.05), (70, 0.3), (130, 1.0)):
            disturbance.wait_for_step(step)
            name = disturbance.random_node()
            disturbance.job.processes[name].signal(signal.SIGTERM)
            disturbance.pause(gap_seconds)
            disturbance.kill(name)
            start_again(disturbance, name)


@pytest.mark.timeout(600)
def test_drained_nodes_leave_without_a_recovery(tmp_path: Path, references: References) -> None:
    """And one joins."""
    with disturbed(Job(tmp_path, SHORT), references, seed=11) as disturbance:
        disturbance.wait_for_step(5)
        for name in ("node-0", "node-1"):
            disturbance.note(f"drained {name}", bound_seconds=2.0)
            node = disturbance.job.processes[name]
            node.signal(signal.SIGTERM)
            assert node.popen.wait(DRAIN_SECONDS) == 0
    assert "recovery" not in disturbance.job.processes["control-plane"].log.read_text()
