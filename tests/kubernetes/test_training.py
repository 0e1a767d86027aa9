"""A training job goes on through what a cluster does to its pool and its control plane."""

from __future__ import annotations

import pytest

from tests.kubernetes.conftest import Machines
from tests.kubernetes.release import Release, all_objects, is_ready, restarts, wait_until
from tests.kubernetes.training import Training

pytestmark = pytest.mark.timeout(3600)

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
"""Relative, as those of `distca train --verify` in float32: a rounding is 6e-8, and a sum has a few
thousand."""

FAIL_OVER_SECONDS = 120.0
"""Lease, start of a new pod on two busy cores."""

WITHOUT_END = 1_000_000


def test_a_job_loses_no_step_to_a_rolling_update_and_a_dead_leader(
    release: Release, machines: Machines
) -> None:
    settings = (
        "controlPlane.replicas=2",
        "controlPlane.leaderElection.enabled=true",
        "attentionNode.replicas=2",
        "attentionNode.resources.requests.cpu=100m",
        "attentionNode.doctor.enabled=false",
    )
    objects = all_objects(release.api)
    release.install(*settings)
    training = Training(release, machines.kubelets, "example")
    training.start(WITHOUT_END)
    training.wait_for_steps(5)

    before = {pod["metadata"]["uid"] for pod in release.pods("attention-node")}
    release.upgrade(*settings, "attentionNode.podAnnotations.rolled=yes")
    after = release.pods("attention-node")
    assert len(after) == 2
    assert before.isdisjoint(pod["metadata"]["uid"] for pod in after)
    assert all(is_ready(pod) and not restarts(pod) for pod in after)
    training.wait_for_steps(5)

    leader = wait_until("a leader", release.leader, FAIL_OVER_SECONDS)
    transitions = release.lease()["leaseTransitions"]
    lose(release, leader)
    training.wait_for_steps(5)

    def another_leads() -> bool:
        found = release.leader()
        return found is not None and found["metadata"]["uid"] != leader["metadata"]["uid"]

    wait_until("another leader", another_leads, FAIL_OVER_SECONDS)
    assert release.lease()["leaseTransitions"] > transitions
    wait_until(
        "two control planes",
        lambda: [is_ready(pod) for pod in release.pods("control-plane")] == [True, True],
        FAIL_OVER_SECONDS,
    )
    release.test()
    training.wait_for_steps(5)

    assert not any(restarts(pod) for pod in training.pods())
    for step in training.steps():
        assert step.loss_difference is not None
        assert step.gradient_difference is not None
        assert step.loss_difference <= LOSS_TOLERANCE, step
        assert step.gradient_difference <= GRADIENT_TOLERANCE, step
    training.remove()
    release.uninstall(objects)


def lose(release: Release, pod: dict[str, dict[str, str]]) -> None:
    """The machine of the pod is gone, and somebody says so: no signal, no grace."""
    path = f"/api/v1/namespaces/{release.namespace}/pods/{pod['metadata']['name']}"
    release.api.delete(path, {"gracePeriodSeconds": 0})
