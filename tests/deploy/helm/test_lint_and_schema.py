"""helm lint, and values that must be refused by name."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.deploy.helm.chart import CHART, VALUE_SETS, VERSIONS, helm, refusal, rendered_text


@pytest.mark.parametrize("version", VERSIONS)
def test_lint_finds_nothing_in_any_value_set(version: str) -> None:
    assert len(VALUE_SETS) >= 12
    for name in VALUE_SETS:
        linted = helm(
            "lint", "--strict", str(CHART), f"--values={CHART}/ci/{name}", version=version
        )
        assert linted.returncode == 0, (name, linted.stdout, linted.stderr)


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_both_helms_render_the_same(value_set: str) -> None:
    texts = [rendered_text(value_set, version=version) for version in VERSIONS]
    # The Secret of tokens is random.
    documents = [
        sorted(
            (each for each in yaml.load_all(text, yaml.CSafeLoader) if each["kind"] != "Secret"),
            key=json.dumps,
        )
        for text in texts
    ]
    assert documents[0] == documents[1]


def test_rendered_text_has_no_blank_lines_and_no_nulls() -> None:
    for name in VALUE_SETS:
        lines = rendered_text(name).splitlines()
        assert not [line for line in lines if line.isspace() or line.endswith((": null", "<nil>"))]


@pytest.mark.parametrize(
    ("setting", "path"),
    [
        ("controlPlane.replica=2", "replica"),
        ("controlPlane.replicas=0", "controlPlane.replicas"),
        ("controlPlane.address=nowhere", "controlPlane.address"),
        ("controlPlane.service.port=70000", "controlPlane.service.port"),
        ("controlPlane.image.digest=latest", "controlPlane.image.digest"),
        ("attentionNode.kind=ReplicaSet", "attentionNode.kind"),
        ("attentionNode.rollout.maxUnavailable=0", "attentionNode.rollout.maxUnavailable"),
        (
            "attentionNode.podDisruptionBudget.maxUnavailable=0%",
            "attentionNode.podDisruptionBudget.maxUnavailable",
        ),
        ("monitoring.podMonitor.scrapeTimeout=10", "monitoring.podMonitor.scrapeTimeout"),
        ("attentionNode.serversPerPod=0", "attentionNode.serversPerPod"),
        ("attentionNode.shapes={8:2:64}", "attentionNode.shapes.0"),
        ("attentionNode.shapes={8:2:64:float32:soft}", "attentionNode.shapes.0"),
        ("attentionNode.drainSeconds=-1", "attentionNode.drainSeconds"),
        ("attentionNode.drainSeconds=31536001", "attentionNode.drainSeconds"),
        ("attentionNode.doctor.skip={gpus}", "attentionNode.doctor.skip.0"),
        ("controlPlane.planner=best", "controlPlane.planner"),
        ("attentionNode.sharedMemorySize=lots", "attentionNode.sharedMemorySize"),
        ("gpu.count=0", "gpu.count"),
        ("gpu.resourceName=nvidia.com/", "gpu.resourceName"),
        ("transport=tcp", "transport"),
        ("rdma.resourceName=/dev/infiniband", "rdma.resourceName"),
        ("rdma.addressType=ethernet", "rdma.addressType"),
        ("ucx.tcpPortRange=7800", "ucx.tcpPortRange"),
        ("ucx.tcpPortRange=0-99", "ucx.tcpPortRange"),
        ("ucx.tcpPortRange=07800-07899", "ucx.tcpPortRange"),
        ("ucx.env.PATH=x", "ucx.env"),
        ("autoscaling.minReplicas=0", "autoscaling.minReplicas"),
        ("autoscaling.kind=VPA", "autoscaling.kind"),
        ("tls.mode=on", "tls.mode"),
        ("tls.certManager.duration=a while", "tls.certManager.duration"),
        ("networkPolicy.jobPodLabels=null", "networkPolicy.jobPodLabels"),
        ("monitoring.podMonitor.interval=15", "monitoring.podMonitor.interval"),
        ("exampleJob.placement=elsewhere", "exampleJob.placement"),
        ("logLevel=loud", "logLevel"),
        ("image.pullPolicy=Sometimes", "image.pullPolicy"),
    ],
)
def test_the_schema_refuses_and_names_the_value(setting: str, path: str) -> None:
    for version in VERSIONS:
        said = refusal(setting, version=version)
        assert all(part in said for part in path.split(".")), said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["controlPlane.enabled=false"], "controlPlane.address is empty"),
        (["controlPlane.address=a:1"], "an address is only for a control plane outside"),
        (["controlPlane.replicas=2"], "controlPlane.leaderElection.enabled is false"),
        (
            ["autoscaling.enabled=true", "attentionNode.kind=DaemonSet"],
            "only a StatefulSet or a Deployment",
        ),
        (["autoscaling.enabled=true", "attentionNode.enabled=false"], "there is no pool to scale"),
        (["autoscaling.minReplicas=9"], "the first must not be larger"),
        (["tls.mode=secrets"], "tls.secrets."),
        (["exampleJob.enabled=true", "attentionNode.enabled=false"], "choose in-place"),
        (
            ["attentionNode.hostNetwork=true", "attentionNode.kind=DaemonSet"],
            "networkPolicy.hostNetworkFrom is empty",
        ),
        (
            ["attentionNode.hostNetwork=true", "networkPolicy.enabled=false"],
            "two pods on one machine would want the same ports",
        ),
        *(
            (
                ["attentionNode.hostNetwork=true", "networkPolicy.enabled=false", *several],
                "two pods on one machine would want the same ports",
            )
            for several in (
                ["attentionNode.kind=Deployment"],
                ["attentionNode.replicas=1", "autoscaling.enabled=true"],
                [
                    "attentionNode.kind=LeaderWorkerSet",
                    "attentionNode.replicas=1",
                    "attentionNode.leaderWorkerSet.size=2",
                    "attentionNode.updateStrategy.type=RollingUpdate",
                ],
            )
        ),
        (["attentionNode.stuckSeconds=10"], "must be left out before it gives up"),
        (["attentionNode.rollout.maxUnavailable=2"], "raise the budget, or lower the former"),
        (
            ["attentionNode.rollout.maxUnavailable=30%", "attentionNode.replicas=10"],
            "maxUnavailable is 30% and attentionNode.podDisruptionBudget.maxUnavailable 1",
        ),
        (
            [
                "attentionNode.replicas=10",
                "attentionNode.rollout.maxUnavailable=30%",
                "attentionNode.podDisruptionBudget.maxUnavailable=20%",
            ],
            "raise the budget",
        ),
        (
            [
                "attentionNode.rollout.maxUnavailable=100%",
                "attentionNode.podDisruptionBudget.maxUnavailable=100%",
            ],
            "the whole pool at a time: give at most 1",
        ),
        (
            [
                "controlPlane.replicas=2",
                "controlPlane.leaderElection.enabled=true",
                "controlPlane.podDisruptionBudget.minAvailable=51%",
            ],
            "no machine with one could be drained: give at most 1",
        ),
        (["ucx.tcpPortRange=7900-7800"], "the first port must not be larger"),
    ],
)
def test_contradictions_are_refused_with_what_to_do(settings: list[str], message: str) -> None:
    assert message in refusal(*settings)


def test_the_package_holds_the_charts_files_alone(tmp_path: Path) -> None:
    packed = helm("package", str(CHART), f"--destination={tmp_path}")
    assert packed.returncode == 0, packed.stderr
    (path,) = tmp_path.glob("distca-*.tgz")
    with tarfile.open(path) as archive:
        names = archive.getnames()
    assert "distca/values.schema.json" in names
    assert any(name.startswith("distca/dashboards/") for name in names)
    assert any(name.startswith("distca/rules/") for name in names)
    allowed = (".yaml", ".json", ".tpl", ".txt", ".md", ".helmignore")
    assert not [name for name in names if not name.endswith(allowed)]
    assert not [name for name in names if name.startswith("distca/ci/")]
