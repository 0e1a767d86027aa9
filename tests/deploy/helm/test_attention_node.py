"""Attention nodes: workload, devices, shared memory, end of a pod, scaling."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.deploy.helm.chart import (
    CHART,
    VALUE_SETS,
    Manifest,
    container,
    containers,
    helm,
    only,
    pod_specs,
    rendered,
)


def pod(value_set: str = "", *settings: str) -> Manifest:
    """The pod of the attention nodes."""
    manifests = rendered(value_set, *settings)
    (spec,) = (
        spec
        for owner, spec in pod_specs(manifests)
        if owner.endswith("attention-node") and not owner.startswith("Pod")
    )
    return spec


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("StatefulSet", "updateStrategy"),
        ("Deployment", "strategy"),
        ("DaemonSet", "updateStrategy"),
    ],
)
def test_an_upgrade_replaces_as_many_pods_as_asked_for(kind: str, field: str) -> None:
    settings = [
        f"attentionNode.kind={kind}",
        "attentionNode.replicas=8",
        "attentionNode.rollout.maxUnavailable=3",
        "attentionNode.podDisruptionBudget.maxUnavailable=50%",
    ]
    manifests = rendered("", *settings)
    spec = only(manifests, kind, "attention-node")["spec"]
    assert spec[field]["type"] == "RollingUpdate"
    assert spec[field]["rollingUpdate"]["maxUnavailable"] == 3
    # A pod beyond the pool's size would wait for a GPU that no machine has.
    assert spec[field]["rollingUpdate"].get("maxSurge", 0) == 0
    own = rendered("", *settings, "attentionNode.updateStrategy.type=OnDelete")
    assert only(own, kind, "attention-node")["spec"][field] == {"type": "OnDelete"}


def test_another_version_of_the_chart_leaves_pods_as_they_are(tmp_path: Path) -> None:
    """A label of the version would start every node again."""
    newer = tmp_path / "distca"
    shutil.copytree(CHART, newer)
    about = (newer / "Chart.yaml").read_text()
    (newer / "Chart.yaml").write_text(re.sub(r"(?m)^(version|appVersion): .*", r"\1: 9.9.9", about))
    templates = []
    for chart in (CHART, newer):
        done = helm("template", "rel", str(chart), "--set=image.tag=a")
        pools = [each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "StatefulSet"]
        templates.append(pools[0]["spec"]["template"])
        assert pools[0]["metadata"]["labels"]["helm.sh/chart"] in ("distca-0.1.0", "distca-9.9.9")
    assert templates[0] == templates[1]


def test_pods_spread_over_machines_unless_told_otherwise() -> None:
    for value_set, name in (
        ("", "attention-node"),
        ("high-availability-values.yaml", "control-plane"),
    ):
        kind = "Deployment" if name == "control-plane" else "StatefulSet"
        template = only(rendered(value_set), kind, name)["spec"]["template"]
        (spread,) = template["spec"]["topologySpreadConstraints"]
        assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
        assert (
            spread["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        )
    own = "attentionNode.topologySpreadConstraints[0].topologyKey=rack"
    assert pod("", own)["topologySpreadConstraints"] == [{"topologyKey": "rack"}]


def test_a_pool_may_be_a_deployment_that_scales() -> None:
    for value_set, kind in (
        ("autoscaling-hpa-values.yaml", "HorizontalPodAutoscaler"),
        ("autoscaling-keda-values.yaml", "ScaledObject"),
    ):
        scaled = rendered(value_set, "attentionNode.kind=Deployment")
        target = only(scaled, kind)["spec"]["scaleTargetRef"]
        assert target["kind"] == "Deployment"
        assert target["name"] == only(scaled, "Deployment", "attention-node")["metadata"]["name"]
        assert "replicas" not in only(scaled, "Deployment", "attention-node")["spec"]


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_no_pod_mounts_devices_of_the_machine_or_is_privileged(value_set: str) -> None:
    for _, spec in pod_specs(rendered(value_set)):
        paths = [volume.get("hostPath", {}).get("path", "") for volume in spec["volumes"]]
        assert not any(path.startswith("/dev") for path in paths)
        for each in containers(spec):
            context = each["securityContext"]
            assert not context.get("privileged")
            assert context["allowPrivilegeEscalation"] is False
            assert set(context["capabilities"].get("add", [])) <= {"IPC_LOCK"}


def test_one_doctor_sees_the_devices_of_all_servers() -> None:
    spec = pod("daemonset-values.yaml", "rdma.enabled=true")
    (doctor,) = spec["initContainers"]
    servers = [each for each in spec["containers"] if each["name"].startswith("server-")]
    for device in ("nvidia.com/gpu", "rdma/ib"):
        had = [each["resources"]["limits"][device] for each in servers]
        assert (had, doctor["resources"]["limits"][device]) == ([1] * 8, 8)
    also = [f"--also-device=cuda:{index}" for index in range(1, 8)]
    assert [each for each in doctor["args"] if each.startswith("--also-device")] == also
    assert not any("also-device" in each for each in container(pod(), "doctor")["args"])
