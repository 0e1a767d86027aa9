"""The control plane: Deployment, Service, disruption budget, rights."""

from __future__ import annotations

import base64

from tests.deploy.helm.chart import (
    Manifest,
    container,
    containers,
    kinds,
    only,
    pod_specs,
    rendered,
)


def test_budgets_exist_from_two_pods_on_and_leave_room_to_drain() -> None:
    def budgets(*settings: str) -> dict[str, Manifest]:
        return {
            each["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]: each["spec"]
            for each in rendered("", *settings)
            if each["kind"] == "PodDisruptionBudget"
        }

    assert set(budgets()) == {"attention-node"}
    assert budgets("attentionNode.replicas=1") == {}
    elected = ("controlPlane.replicas=2", "controlPlane.leaderElection.enabled=true")
    assert budgets(*elected)["control-plane"]["minAvailable"] == 1
    grows = ("autoscaling.enabled=true", "attentionNode.replicas=1")
    assert set(budgets(*grows)) == {"attention-node"}
    assert set(budgets(*grows, "autoscaling.maxReplicas=1")) == set()
    # Kubernetes cannot count the pods that a DaemonSet wants: a budget would refuse every eviction.
    assert budgets("attentionNode.kind=DaemonSet") == {}


def test_it_passes_pod_security_standard_restricted() -> None:
    for value_set in ("", "high-availability-values.yaml", "mtls-own-authority-values.yaml"):
        for owner, spec in pod_specs(rendered(value_set)):
            if "control-plane" in owner or owner.startswith("Pod"):
                assert_restricted(spec)


def assert_restricted(spec: Manifest) -> None:
    """What the Pod Security Standard "restricted" asks of a pod."""
    assert not spec.get("hostNetwork")
    assert not spec.get("hostPID")
    assert not spec.get("hostIPC")
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    allowed = {"configMap", "emptyDir", "secret", "projected", "persistentVolumeClaim", "name"}
    assert all(set(volume) <= allowed for volume in spec["volumes"])
    for each in containers(spec):
        context = each["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not any("hostPort" in port for port in each.get("ports", []))


def test_the_secret_of_tokens_is_made_unless_one_is_named() -> None:
    made = only(rendered(), "Secret")
    assert len(base64.b64decode(made["data"]["secret"])) == 48
    manifests = rendered("", "controlPlane.tokenSecret.name=mine,controlPlane.tokenSecret.key=k")
    assert "Secret" not in kinds(manifests)
    spec = only(manifests, "Deployment")["spec"]["template"]["spec"]
    (volume,) = (each for each in spec["volumes"] if each["name"] == "token")
    assert volume["secret"]["secretName"] == "mine"
    run = container(spec, "control-plane")
    assert "--token-secret=/etc/distca/token/k" in run["args"]
    assert "/etc/distca/token" in [mount["mountPath"] for mount in run["volumeMounts"]]
