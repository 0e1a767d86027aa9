"""What a real API server says of the chart's objects, and a real scheduler of its pods."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kubernetes.client import ApiException

from tests.helm.chart import VALUE_SETS, kinds, pod_specs, rendered
from tests.kubernetes.api import STRATEGIC, Api, Object
from tests.kubernetes.conftest import Machines
from tests.kubernetes.pod_status import now
from tests.kubernetes.release import make_namespace, wait_until

SPACE = "research"
"""The namespace of tests.helm.chart."""

COLLECTIONS = {
    "ConfigMap": "/api/v1",
    "Pod": "/api/v1",
    "Secret": "/api/v1",
    "Service": "/api/v1",
    "ServiceAccount": "/api/v1",
    "DaemonSet": "/apis/apps/v1",
    "Deployment": "/apis/apps/v1",
    "StatefulSet": "/apis/apps/v1",
    "HorizontalPodAutoscaler": "/apis/autoscaling/v2",
    "Lease": "/apis/coordination.k8s.io/v1",
    "NetworkPolicy": "/apis/networking.k8s.io/v1",
    "PodDisruptionBudget": "/apis/policy/v1",
    "ResourceClaimTemplate": "/apis/resource.k8s.io/v1",
    "Role": "/apis/rbac.authorization.k8s.io/v1",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1",
}

OF_OPERATORS = {
    "Certificate",
    "ClusterTrainingRuntime",
    "ComputeDomain",
    "Issuer",
    "JobSet",
    "LeaderWorkerSet",
    "PodMonitor",
    "PrometheusRule",
    "ScaledObject",
    "ServiceMonitor",
    "TrainJob",
    "TrainingRuntime",
}


@pytest.fixture(scope="module")
def api(machines: Machines) -> Iterator[Api]:
    """With the charts' namespace, which takes only restricted pods."""
    found = machines.api
    for name in (SPACE, "team-a", "team-b"):
        make_namespace(found, name, restricted=name == SPACE)
    yield found
    for name in (SPACE, "team-a", "team-b"):
        found.delete(f"/api/v1/namespaces/{name}")


def try_to_create(api: Api, manifest: Object) -> None:
    """Has the API server check an object as if it were made, unknown fields included."""
    kind, space = manifest["kind"], manifest["metadata"].get("namespace", SPACE)
    plural = f"{kind.lower()[:-1]}ies" if kind.endswith("y") else f"{kind.lower()}s"
    path = f"{COLLECTIONS[kind]}/namespaces/{space}/{plural}"
    api.create(f"{path}?dryRun=All&fieldValidation=Strict", manifest)


def by_itself(spec: Object) -> Object:
    """A pod's spec without references to objects of its release or cluster, which admission asks
    for."""
    others = ("serviceAccountName", "priorityClassName", "runtimeClassName")
    return {key: value for key, value in spec.items() if key not in others}


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_all_objects_are_admitted(api: Api, value_set: str) -> None:
    manifests = rendered(value_set)
    assert kinds(manifests) <= COLLECTIONS.keys() | OF_OPERATORS
    for manifest in manifests:
        if manifest["kind"] in COLLECTIONS:
            try_to_create(api, manifest)


def beyond_restricted(spec: Object) -> set[str]:
    """What docs/deploy_kubernetes.md names as going beyond Pod Security Standard *restricted*."""
    found = {name for name in ("hostIPC", "hostPID", "hostNetwork") if spec.get(name)}
    found |= {"hostPath" for volume in spec.get("volumes", []) if "hostPath" in volume}
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        found |= set(container["securityContext"].get("capabilities", {}).get("add", []))
    return found


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_pods_pass_the_restricted_standard_where_it_is_claimed(api: Api, value_set: str) -> None:
    for owner, spec in pod_specs(rendered(value_set)):
        pod = {"kind": "Pod", "metadata": {"name": "tried"}, "spec": by_itself(spec)}
        beyond = beyond_restricted(spec)
        if beyond:
            assert beyond <= {"IPC_LOCK", "hostIPC", "hostNetwork", "hostPID", "hostPath"}
            assert "control-plane" not in owner
            with pytest.raises(ApiException, match="violates PodSecurity"):
                try_to_create(api, pod)
        else:
            try_to_create(api, pod)


@pytest.fixture
def gpu_machine(machines: Machines) -> Iterator[str]:
    """A machine with GPUs and their taint, which runs nothing."""
    api, name = machines.api, "gpu-0"
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    api.create("/api/v1/nodes", {"metadata": {"name": name}, "spec": {"taints": [taint]}})
    has = {"cpu": "64", "memory": "512Gi", "pods": "20", "nvidia.com/gpu": "2"}
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": now()}
    status = {"capacity": has, "allocatable": has, "conditions": [ready]}
    api.patch(f"/api/v1/nodes/{name}/status", {"status": status}, STRATEGIC)
    yield name
    api.delete(f"/api/v1/nodes/{name}")


def test_nodes_are_put_where_gpus_are(machines: Machines, api: Api, gpu_machine: str) -> None:
    (spec,) = (spec for owner, spec in pod_specs(rendered()) if owner.startswith("StatefulSet"))
    spec = by_itself(spec)
    pods = f"/api/v1/namespaces/{SPACE}/pods"
    names = [f"node-{number}" for number in range(3)]
    for name in names:
        api.create(pods, {"metadata": {"name": name}, "spec": spec})

    def places() -> list[str]:
        return sorted(pod["spec"].get("nodeName", "") for pod in api.items(pods))

    wait_until("two pods have GPUs", lambda: places() == ["", gpu_machine, gpu_machine], 60.0)

    def told() -> bool:
        # The scheduler has not yet come to a pod without conditions.
        found = [pod["status"].get("conditions", []) for pod in api.items(pods)]
        conditions = [each for of_pod in found for each in of_pod]
        return any("Insufficient nvidia.com/gpu" in each.get("message", "") for each in conditions)

    wait_until("the third is told why it waits", told, 60.0)
    for name in names:
        api.delete(f"{pods}/{name}", {"gracePeriodSeconds": 0})
