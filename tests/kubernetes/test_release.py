"""A release's life on a real API server and scheduler: installed, upgraded from the version before,
tested, taken away."""

from __future__ import annotations

import base64

import pytest

from tests.kubernetes.conftest import BEFORE_TAG, Machines
from tests.kubernetes.release import Release, all_objects, is_ready, restarts, wait_until

pytestmark = pytest.mark.timeout(1800)

ELECTED = ("controlPlane.replicas=2", "controlPlane.leaderElection.enabled=true")
SMALL = ("attentionNode.replicas=1", "attentionNode.resources.requests.cpu=100m")


def test_it_is_installed_tested_and_leaves_nothing(release: Release) -> None:
    before = all_objects(release.api)
    release.install(*ELECTED, *SMALL)
    pods = [*release.pods("control-plane"), *release.pods("attention-node")]
    assert len(pods) == 3
    assert all(is_ready(pod) and not restarts(pod) for pod in pods)
    assert release.leader() is not None
    release.test()
    release.uninstall(before)


def test_it_follows_the_version_before(release: Release, machines: Machines) -> None:
    secret = f"/api/v1/namespaces/{release.namespace}/secrets/distca-control-plane-token"
    old = machines.before / "helm" / "distca"
    objects = all_objects(release.api)
    release.install(f"image.tag={BEFORE_TAG}", *ELECTED, *SMALL, chart=old)
    token = release.api.get(secret)["data"]["secret"]
    assert len(base64.b64decode(token)) == 48
    transitions = release.lease()["leaseTransitions"]
    release.upgrade(*ELECTED, *SMALL)
    pods = [*release.pods("control-plane"), *release.pods("attention-node")]
    images = {pod["spec"]["containers"][0]["image"].rpartition(":")[2] for pod in pods}
    assert len(pods) == 3
    assert BEFORE_TAG not in images
    assert all(is_ready(pod) and not restarts(pod) for pod in pods)
    assert wait_until("a leader", release.leader, 60.0) is not None
    assert release.lease()["leaseTransitions"] > transitions
    assert release.api.get(secret)["data"]["secret"] == token
    release.test()
    # A control plane of before made it, so it is no part of the release: docs/deploy_kubernetes.md.
    # While one runs it would make another.
    lease = f"/apis/coordination.k8s.io/v1 leases {release.namespace} distca-control-plane"
    release.uninstall(objects | {lease})
    release.lease()
    release.api.delete(release.lease_path)
    assert all_objects(release.api) <= objects
