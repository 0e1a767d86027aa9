"""Values that are refused, each by the name of what is wrong."""

from __future__ import annotations

import pytest

from tests.deploy.helm.chart import VERSIONS, refusal

BUDGET = "attentionNode.podDisruptionBudget.maxUnavailable"
ROLLOUT = "attentionNode.rollout.maxUnavailable"


@pytest.mark.parametrize(
    "setting",
    [
        "controlPlane.replicas=0",
        "controlPlane.address=nowhere",
        "controlPlane.service.port=70000",
        "controlPlane.image.digest=latest",
        "controlPlane.planner=best",
        "attentionNode.kind=ReplicaSet",
        f"{ROLLOUT}=0",
        f"{BUDGET}=0%",
        "attentionNode.serversPerPod=0",
        "attentionNode.shapes={8:2:64}",
        "attentionNode.drainSeconds=31536001",
        "attentionNode.doctor.skip={gpus}",
        "attentionNode.sharedMemorySize=lots",
        "gpu.count=2",
        "gpu.resourceName=nvidia.com/",
        "transport=tcp",
        "rdma.resourceName=/dev/infiniband",
        "rdma.addressType=ethernet",
        "ucx.tcpPortRange=07800-07899",
        "ucx.env.PATH=x",
        "autoscaling.kind=VPA",
        "tls.mode=on",
        "tls.certManager.duration=a while",
        "networkPolicy.jobPodLabels=null",
        "monitoring.podMonitor.interval=15",
        "logLevel=loud",
        "image.pullPolicy=Sometimes",
    ],
)
def test_the_schema_refuses_and_names_the_value(setting: str) -> None:
    # A pattern of names is checked by the object that holds them.
    path = "ucx.env" if setting.startswith("ucx.env") else setting.partition("=")[0]
    for version in VERSIONS:
        said = refusal(setting, version=version)
        assert all(part in said for part in path.split(".")), said


def test_a_value_that_there_is_not_is_refused() -> None:
    assert "replica" in refusal("controlPlane.replica=2")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("controlPlane.enabled=false", "controlPlane.address"),
        ("controlPlane.address=a:1", "controlPlane.address"),
        ("controlPlane.replicas=2", "controlPlane.leaderElection.enabled"),
        ("autoscaling.enabled=true attentionNode.kind=DaemonSet", "attentionNode.kind"),
        ("autoscaling.enabled=true attentionNode.enabled=false", "autoscaling"),
        ("autoscaling.minReplicas=9", "autoscaling.minReplicas"),
        ("tls.mode=secrets", "tls.secrets."),
        (
            "attentionNode.hostNetwork=true attentionNode.kind=DaemonSet",
            "networkPolicy.hostNetworkFrom",
        ),
        *(
            (f"attentionNode.hostNetwork=true networkPolicy.enabled=false {several}", "same ports")
            for several in (
                "",
                "attentionNode.kind=Deployment",
                "attentionNode.replicas=1 autoscaling.enabled=true",
            )
        ),
        ("attentionNode.stuckSeconds=10", "attentionNode.stuckSeconds"),
        (f"{ROLLOUT}=2", BUDGET),
        (f"attentionNode.replicas=10 {ROLLOUT}=30%", BUDGET),
        (f"attentionNode.replicas=10 {ROLLOUT}=30% {BUDGET}=20%", BUDGET),
        (f"{ROLLOUT}=100% {BUDGET}=100%", "the whole pool"),
        (
            "controlPlane.replicas=2 controlPlane.leaderElection.enabled=true "
            "controlPlane.podDisruptionBudget.minAvailable=51%",
            "controlPlane.podDisruptionBudget.minAvailable",
        ),
        ("dataInterface.networkAttachment=a", "dataInterface.name"),
        (
            "dataInterface.networkAttachment=a dataInterface.name=net1 "
            r"attentionNode.podAnnotations.k8s\.v1\.cni\.cncf\.io/networks=b",
            "attentionNode.podAnnotations",
        ),
        ("gpu.enabled=false gpu.dra.enabled=true", "gpu"),
        ("gpu.dra.enabled=true", "resource.k8s.io/v1"),
        # Amounts and names that the API server alone would refuse.
        ("image.registry=https://registry.example.com/ml", "image.registry"),
        ("image.registry=ghcr.io/ML", "image.registry"),
        ("controlPlane.resources.limits.memory=1023Mi", "controlPlane.resources.requests.memory"),
        ("attentionNode.resources.limits.cpu=3999m", "attentionNode.resources.requests.cpu"),
        ("monitoring.podMonitor.scrapeTimeout=1m", "monitoring.podMonitor.scrapeTimeout"),
        (
            "monitoring.serviceMonitor.interval=9s500ms "
            "monitoring.serviceMonitor.scrapeTimeout=10s",
            "monitoring.serviceMonitor.scrapeTimeout",
        ),
        ("tls.certManager.renewBefore=90d", "tls.certManager.renewBefore"),
        # Ports.
        ("ucx.tcpPortRange=7900-7800", "ucx.tcpPortRange"),
        ("ucx.tcpPortRange=70000-80000", "65535"),
        ("ucx.env.UCX_TCP_PORT_RANGE=1-2", "UCX_TCP_PORT_RANGE"),
        (
            "attentionNode.extraEnv[0].name=UCX_TCP_PORT_RANGE,attentionNode.extraEnv[0].value=1-2",
            "attentionNode.extraEnv",
        ),
        ("attentionNode.ports.data=7805", "attentionNode.ports.data"),
        ("attentionNode.ports.data=7712", "attentionNode.ports.metrics"),
        (
            "attentionNode.ports.metrics=7720 attentionNode.serversPerPod=2",
            "attentionNode.ports.metrics",
        ),
        ("attentionNode.ports.data=65530 attentionNode.serversPerPod=2", "65535"),
        (
            "ucx.tcpPortRange=7713-65535 attentionNode.serversPerPod=2",
            "attentionNode.ports.data",
        ),
        ("controlPlane.metricsPort=7700", "controlPlane.metricsPort"),
    ],
)
def test_contradictions_are_refused_by_name(settings: str, named: str) -> None:
    assert named in refusal(*settings.split(), kubernetes="1.33.0")
