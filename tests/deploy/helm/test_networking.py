"""NetworkPolicies: who reaches the control plane, the data plane and the metrics."""

from __future__ import annotations

import pytest

from tests.deploy.helm.chart import (
    NAMESPACE,
    Manifest,
    containers,
    environment,
    only,
    pod_specs,
    rendered,
)

JOB_PODS = {"matchLabels": {"distca.dev/role": "trainer"}}


def rules(manifests: list[Manifest], name_ends: str) -> list[Manifest]:
    """The ingress rules of a policy, which must cover ingress alone."""
    spec = only(manifests, "NetworkPolicy", name_ends)["spec"]
    assert spec["policyTypes"] == ["Ingress"]
    return list(spec["ingress"])


def rule_for(manifests: list[Manifest], name_ends: str, port: object) -> Manifest:
    """The one ingress rule that opens ``port``."""
    (found,) = (
        rule
        for rule in rules(manifests, name_ends)
        if port in [each["port"] for each in rule.get("ports", [])]
    )
    return found


@pytest.mark.parametrize("n_ranks", [3, 16])
def test_every_rank_of_a_jobs_pod_is_reached_and_scraped(n_ranks: int) -> None:
    settings = (f"networkPolicy.jobRanksPerPod={n_ranks}", "monitoring.podMonitor.enabled=true")
    manifests = rendered("", *settings)
    names = [f"metrics-{index}" for index in range(n_ranks)]
    rule = rule_for(manifests, "jobs", "metrics-0")
    assert [port["port"] for port in rule["ports"]] == names
    monitor = only(manifests, "PodMonitor", "trainer")
    assert [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]] == names


def test_nodes_and_named_others_reach_jobs_in_every_namespace_that_is_named() -> None:
    settings = ["jobsFrom[0].podSelector.a=b", "jobNamespaces={team-a}"]
    manifests = rendered(
        "network-policy-values.yaml", *(f"networkPolicy.{setting}" for setting in settings)
    )
    policies = {
        policy["metadata"]["namespace"]: policy["spec"]["ingress"]
        for policy in manifests
        if policy["kind"] == "NetworkPolicy" and policy["metadata"]["name"].endswith("-jobs")
    }
    assert set(policies) == {NAMESPACE, "team-a"}
    for among_themselves, _, _ in policies.values():
        assert among_themselves["from"] == [{"podSelector": JOB_PODS}, {"podSelector": {"a": "b"}}]
    ((near,), (far,)) = (policies[each][1]["from"] for each in (NAMESPACE, "team-a"))
    assert "namespaceSelector" not in near
    assert far["podSelector"] == near["podSelector"]
    own = {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}}
    assert far["namespaceSelector"] == own


def test_the_ports_that_open_are_those_that_ucx_is_told_to_use() -> None:
    manifests = rendered("", "ucx.tcpPortRange=9000-9009")
    for name in ("attention-node", "jobs"):
        ports = rule_for(manifests, name, 9000)["ports"]
        assert {"protocol": "TCP", "port": 9000, "endPort": 9009} in ports
    for owner, spec in pod_specs(manifests):
        if owner.startswith("StatefulSet"):
            for each in containers(spec):
                assert environment(each)["UCX_TCP_PORT_RANGE"] == "9000-9009"


def test_ports_in_policies_are_ports_of_the_pods() -> None:
    manifests = rendered("network-policy-values.yaml")
    for owner, spec in pod_specs(manifests):
        if not owner.startswith(("Deployment", "StatefulSet")):
            continue
        named = {port["name"] for each in spec["containers"] for port in each["ports"]}
        opened = [each["port"] for rule in rules(manifests, owner[-9:]) for each in rule["ports"]]
        assert {port for port in opened if isinstance(port, str)} == named
