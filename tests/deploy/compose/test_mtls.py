"""The override with mutual TLS."""

from __future__ import annotations

import pytest

from tests.deploy.compose_project import ComposeProject
from tests.deploy.docker_engine import DockerError

pytestmark = pytest.mark.timeout(2400)

SERVICES = ("certificates", "control-plane", "attention-node", "trainer-0", "trainer-1")


@pytest.mark.parametrize("project", [("compose.mtls.yaml",)], indirect=True)
def test_training_with_mutual_tls(project: ComposeProject) -> None:
    project.up(nodes=1, services=SERVICES)
    assert project.wait_for_trainers() == [0, 0], project.tails()
    found = project.run_record()["verification"]
    assert found["gradient"] <= found["gradient_tolerance"], found

    control_plane = project.container("control-plane")
    without = "env -u DISTCA_TLS_CERTIFICATE -u DISTCA_TLS_KEY distca health"
    with pytest.raises(DockerError):
        project.docker("exec", control_plane, "sh", "-c", without)
    assert "SERVING" in project.docker("exec", control_plane, "distca", "health")
