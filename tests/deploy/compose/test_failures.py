"""Containers that are stopped or killed while training goes on."""

from __future__ import annotations

import pytest

from tests.deploy.compose_project import ComposeProject

pytestmark = pytest.mark.timeout(2400)

WITHOUT_PROMETHEUS = ("control-plane", "attention-node", "trainer-0", "trainer-1")
N_STEPS = 10


def check_all_steps_equal_local_attention(project: ComposeProject) -> None:
    """A step that was disturbed has the loss and gradients of an undisturbed one."""
    record = project.run_record()
    assert len(record["steps"]) == N_STEPS
    found = record["verification"]
    assert found["gradient"] <= found["gradient_tolerance"], found


def test_a_job_outlives_a_killed_node_a_stopped_one_and_a_new_control_plane(
    project: ComposeProject,
) -> None:
    project.up(nodes=3, services=WITHOUT_PROMETHEUS)
    project.wait_for_step(3)
    victim, leaving, _ = project.containers("attention-node")
    project.docker("kill", victim)
    project.wait_for_step(5)
    project.docker("stop", "--time=75", leaving)
    assert project.exit_code(leaving) == 0, project.logs(leaving)
    assert "drained" in project.logs(leaving)
    control_plane = project.container("control-plane")
    project.docker("kill", control_plane)
    project.docker("start", control_plane)
    assert project.wait_for_trainers() == [0, 0], project.tails()
    check_all_steps_equal_local_attention(project)


def test_stopped_trainers_save_and_a_stopped_control_plane_exits_cleanly(
    project: ComposeProject,
) -> None:
    project.up(nodes=1, services=WITHOUT_PROMETHEUS)
    project.wait_for_step(3)
    trainers = [project.container(f"trainer-{rank}") for rank in (0, 1)]
    project.docker("stop", "--time=90", *trainers)
    assert [project.exit_code(trainer) for trainer in trainers] == [130, 130], project.tails()
    checkpoints = "ls /runs/demo/checkpoints"
    image = project.docker.inspect(trainers[0])["Config"]["Image"]
    saved = project.docker.shell(image, checkpoints, f"--volumes-from={trainers[0]}")
    assert saved.startswith("step-")

    control_plane = project.container("control-plane")
    project.docker("stop", "--time=20", control_plane)
    assert project.exit_code(control_plane) == 0, project.logs(control_plane)
