"""The control plane: Deployment, Service, disruption budget, rights."""

from __future__ import annotations

import base64

import pytest

from tests.deploy.helm.chart import (
    Manifest,
    container,
    containers,
    environment,
    kinds,
    only,
    pod_specs,
    rendered,
)


def deployment(value_set: str = "", *settings: str) -> Manifest:
    return only(rendered(value_set, *settings), "Deployment")


def test_one_replica_is_replaced_not_doubled() -> None:
    spec = deployment()["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (1, "Recreate")


def test_service_and_disruption_budget_select_its_pods_alone() -> None:
    manifests = rendered("high-availability-values.yaml")
    labels = deployment()["spec"]["template"]["metadata"]["labels"]
    for selector in (
        only(rendered(), "Service", "control-plane")["spec"]["selector"],
        only(manifests, "PodDisruptionBudget", "control-plane")["spec"]["selector"]["matchLabels"],
        deployment()["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
        assert selector["app.kubernetes.io/component"] == "control-plane"


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


def probe_paths(run: Manifest) -> list[str]:
    """What the probes for startup, readiness and liveness ask for, all at the metrics port."""
    asked = [run[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    assert all(each["port"].startswith("metrics") for each in asked)
    return [each["path"] for each in asked]


def test_probes_need_no_certificate_with_tls_or_without() -> None:
    for value_set in ("", "mtls-own-authority-values.yaml"):
        run = container(deployment(value_set)["spec"]["template"]["spec"], "control-plane")
        # One that stands by or ends is alive.
        assert probe_paths(run) == ["/readyz", "/readyz", "/livez"]


def test_distca_health_in_the_container_shows_a_certificate_with_tls() -> None:
    tls = deployment("mtls-own-authority-values.yaml")["spec"]["template"]["spec"]
    env = environment(container(tls, "control-plane"))
    assert env["DISTCA_HEALTH_ADDRESS"] == "localhost:7700"
    assert env["DISTCA_TLS_CERTIFICATE"] == "/etc/distca/tls/tls.crt"
    certificate = only(
        rendered("mtls-own-authority-values.yaml"), "Certificate", "distca-control-plane"
    )
    assert "localhost" in certificate["spec"]["dnsNames"]


def test_the_startup_probe_allows_the_seconds_asked_for() -> None:
    spec = deployment("", "controlPlane.startupSeconds=42")["spec"]["template"]["spec"]
    probe = container(spec, "control-plane")["startupProbe"]
    assert 42 <= probe["periodSeconds"] * probe["failureThreshold"] < 47


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


@pytest.mark.parametrize("value_set", ["", "mtls-own-authority-values.yaml"])
def test_standbys_are_ready_and_the_service_leads_to_the_leader_alone(value_set: str) -> None:
    elected = ("controlPlane.replicas=2", "controlPlane.leaderElection.enabled=true")
    spec = deployment(value_set, *elected)["spec"]
    # Else none could be replaced or evicted: the one that serves must not go before another does.
    run = container(spec["template"]["spec"], "control-plane")
    assert probe_paths(run) == ["/livez"] * 3
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert "--leader-pod=$(POD_NAME)" in run["args"]
    assert environment(run)["POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    selector = only(rendered(value_set, *elected), "Service", "control-plane")["spec"]["selector"]
    assert selector.pop("distca.io/leader") == "true"
    assert selector == only(rendered(value_set), "Service", "control-plane")["spec"]["selector"]
    # The process sets it: no pod may begin with it.
    assert "distca.io/leader" not in spec["template"]["metadata"]["labels"]


def test_a_leader_is_elected_with_rights_on_its_lease_and_pods_labels_alone() -> None:
    manifests = rendered("high-availability-values.yaml")
    spec = only(manifests, "Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (3, "RollingUpdate")
    assert spec["template"]["spec"]["automountServiceAccountToken"] is True
    *rules, pods = only(manifests, "Role")["rules"]
    assert pods == {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}
    assert {(*rule["apiGroups"], *rule["resources"]) for rule in rules} == {
        ("coordination.k8s.io", "leases")
    }
    assert only(manifests, "Lease")["metadata"]["name"] == "rel-distca-control-plane"
    named = [rule for rule in rules if "resourceNames" in rule]
    unnamed = [rule for rule in rules if "resourceNames" not in rule]
    assert [rule["verbs"] for rule in unnamed] == [["create"]]
    assert named[0]["resourceNames"] == ["rel-distca-control-plane"]
    run = container(spec["template"]["spec"], "control-plane")
    assert "--leader-lease=$(POD_NAMESPACE)/rel-distca-control-plane" in run["args"]
    assert environment(run)["POD_NAMESPACE"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}
    (subject,) = only(manifests, "RoleBinding")["subjects"]
    assert subject["name"] == spec["template"]["spec"]["serviceAccountName"]
    assert subject["name"] == only(manifests, "ServiceAccount", "control-plane")["metadata"]["name"]


def test_without_a_leader_nothing_may_talk_to_the_api_server() -> None:
    manifests = rendered()
    assert not kinds(manifests) & {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
    for owner, spec in pod_specs(manifests):
        assert spec["automountServiceAccountToken"] is False, owner


def test_without_it_nodes_join_the_one_outside() -> None:
    manifests = rendered("join-elsewhere-values.yaml")
    assert not [
        manifest for manifest in manifests if "control-plane" in manifest["metadata"]["name"]
    ]
    (spec,) = (spec for owner, spec in pod_specs(manifests) if owner.startswith("StatefulSet"))
    known = environment(container(spec, "server-0"))["DISTCA_CONTROL_PLANE"]
    assert known == "distca.example.com:7700"


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
