"""The short form: many faults in one run, since a job takes long to start."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.chaos.hosts import Direction
from tests.chaos.processes import CONTROL_PLANE, STANDBY, Job, JobSettings
from tests.chaos.scenario import STOPPED_SECONDS, References, disturbed
from tests.chaos.schedules import Act, Schedule
from tests.chaos.standstills import BOUND_SECONDS, run
from tests.chaos.test_control_plane import kill_and_restart
from tests.chaos.test_kills import DRAIN_SECONDS, serving
from tests.chaos.test_links import WHY_NOT, cut, on_a_switch

SETTINGS = JobSettings(steps=80, n_nodes=4)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_that_die_stop_and_leave(tmp_path: Path, references: References) -> None:
    with disturbed(Job(tmp_path, SETTINGS), references, seed=1) as disturbance:
        job = disturbance.job
        disturbance.wait_for_tick(backward=False, after_step=4)
        disturbance.kill("node-0")
        job.start_node(0)
        disturbance.wait_for_step(14)
        kill_and_restart(disturbance)
        disturbance.wait_for_tick(backward=True, after_step=24)
        disturbance.kill("node-1")
        disturbance.wait_for_step(34)
        disturbance.note("drained node-2", bound_seconds=2.0)
        job.processes["node-2"].signal(signal.SIGTERM)
        assert job.processes["node-2"].popen.wait(DRAIN_SECONDS) == 0
        disturbance.wait_for_step(44)
        disturbance.stop("node-3")
        disturbance.pause(1.0)
        disturbance.go_on("node-3")
        disturbance.wait_for_step(54)
        disturbance.stop("node-3")
        disturbance.wait_for_step(64)
        disturbance.kill(*serving(disturbance))


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_standstills_of_several_faults_at_once(tmp_path: Path, references: References) -> None:
    """The leading control plane is stopped and a node dies; then two nodes, one killed and one
    stopped, and whoever leads."""
    schedule = Schedule(
        name="short",
        acts=(
            Act(step=6, stops=(CONTROL_PLANE,), kills=("node-0",), stop_seconds=20.0),
            Act(step=40, stops=("node-1",), kills=("node-2", STANDBY), stop_seconds=20.0),
        ),
        standby=True,
    )
    outcome = run(schedule, SETTINGS, references, tmp_path)
    text = [line for each in outcome.standstills for line in outcome.describe(each)]
    print("\n".join(["", *text]))
    assert outcome.longest_own_seconds <= BOUND_SECONDS
    assert "taking over" in (tmp_path / f"{STANDBY}.log").read_text()


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(WHY_NOT is not None, reason=f"no network namespaces: {WHY_NOT}")
def test_links_that_are_cut(tmp_path: Path, references: References) -> None:
    with (
        on_a_switch(tmp_path, SETTINGS) as (links, job),
        disturbed(job, references, seed=2) as disturbance,
    ):
        disturbance.wait_for_step(5)
        cut(links, disturbance, "node-0")
        disturbance.pause(1.0)
        links.heal("node-0")
        disturbance.wait_for_step(20)
        disturbance.note("a lossy link to node-1", STOPPED_SECONDS)
        links.lose("node-1", 0.05)
        disturbance.wait_for_step(30)
        links.heal("node-1")
        cut(links, disturbance, "node-2", Direction.OUT)
        disturbance.wait_for_step(40)
        cut(links, disturbance, "node-3", Direction.IN)
        disturbance.wait_for_step(55)
        disturbance.note("unplugged node-1", STOPPED_SECONDS)
        links.unplug("node-1")
