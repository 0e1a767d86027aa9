"""NetworkPolicies: who reaches the control plane, the data plane and the metrics."""

from __future__ import annotations

import pytest

from tests.deploy.helm.chart import (
    NAMESPACE,
    Manifest,
    container,
    containers,
    environment,
    kinds,
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


def test_control_plane_nodes_and_jobs_are_protected_unless_it_is_turned_off() -> None:
    protected = {
        policy["metadata"]["name"]: policy["spec"]["podSelector"]["matchLabels"]
        for policy in rendered()
        if policy["kind"] == "NetworkPolicy"
    }
    assert protected.pop("rel-distca-jobs") == JOB_PODS["matchLabels"]
    components = {labels["app.kubernetes.io/component"] for labels in protected.values()}
    assert components == {"control-plane", "attention-node"}
    assert "NetworkPolicy" not in kinds(rendered("", "networkPolicy.enabled=false"))


def test_pods_of_jobs_are_protected_without_a_pool_too() -> None:
    manifests = rendered("in-place-only-values.yaml")
    among_themselves, metrics = rules(manifests, "jobs")
    assert among_themselves == {"from": [{"podSelector": JOB_PODS}]}
    assert {port["port"] for port in metrics["ports"]} == {f"metrics-{i}" for i in range(8)}


@pytest.mark.parametrize(
    ("settings", "n_ranks"),
    [
        (("networkPolicy.jobRanksPerPod=3",), 3),
        (("networkPolicy.jobRanksPerPod=16",), 16),
        (("exampleJob.enabled=true", "exampleJob.ranksPerNode=12"), 12),
    ],
)
def test_every_rank_of_a_jobs_pod_is_reached_and_scraped(
    settings: tuple[str, ...], n_ranks: int
) -> None:
    manifests = rendered("", *settings, "monitoring.podMonitor.enabled=true")
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


def test_nodes_in_their_machines_network_call_from_its_addresses() -> None:
    manifests = rendered("daemonset-values.yaml")
    machines = {"ipBlock": {"cidr": "10.0.0.0/16"}}
    assert rule_for(manifests, "jobs", 7800)["from"] == [machines]
    assert machines in rule_for(manifests, "control-plane", "grpc")["from"]


def test_only_pods_of_jobs_reach_the_data_plane() -> None:
    rule = rule_for(rendered(), "attention-node", "data-0")
    assert rule["from"] == [{"podSelector": JOB_PODS}]
    assert {"protocol": "TCP", "port": 7800, "endPort": 7899} in rule["ports"]


def test_the_ports_that_open_are_those_that_ucx_is_told_to_use() -> None:
    settings = ["ucx.tcpPortRange=9000-9009"]
    manifests = rendered("", *settings, "exampleJob.enabled=true")
    for name in ("attention-node", "jobs"):
        ports = rule_for(manifests, name, 9000)["ports"]
        assert {"protocol": "TCP", "port": 9000, "endPort": 9009} in ports
    for owner, spec in pod_specs(manifests):
        if owner.startswith(("StatefulSet", "JobSet")):
            for each in containers(spec):
                assert environment(each)["UCX_TCP_PORT_RANGE"] == "9000-9009"


def test_every_server_of_a_daemon_sets_pod_is_reached_and_scraped() -> None:
    manifests = rendered("daemonset-values.yaml")
    opened = [each["port"] for rule in rules(manifests, "attention-node") for each in rule["ports"]]
    assert {f"data-{index}" for index in range(8)} <= set(opened)
    assert {f"metrics-{index}" for index in range(8)} <= set(opened)


def test_jobs_of_selected_namespaces_are_let_in_beside_those_of_this_one() -> None:
    manifests = rendered("network-policy-values.yaml")
    selected = {"matchLabels": {"distca.dev/jobs": "true"}}
    peers = [{"podSelector": JOB_PODS}, {"podSelector": JOB_PODS, "namespaceSelector": selected}]
    assert rule_for(manifests, "attention-node", "data-0")["from"] == peers
    control_plane = rule_for(manifests, "control-plane", "grpc")["from"]
    assert all(peer in control_plane for peer in peers)


def test_the_control_plane_is_reached_by_the_release_jobs_and_named_others_alone() -> None:
    release = {
        "matchLabels": {
            "app.kubernetes.io/name": "distca",
            "app.kubernetes.io/instance": "rel",
        }
    }
    peers = rule_for(rendered(), "control-plane", "grpc")["from"]
    assert peers == [{"podSelector": release}, {"podSelector": JOB_PODS}]
    named = rule_for(rendered("network-policy-values.yaml"), "control-plane", "grpc")["from"]
    assert {"podSelector": {"matchLabels": {"app": "operator-shell"}}} in named


def test_metrics_are_open_to_all_unless_scrapers_are_named() -> None:
    everyone = rendered()
    named = rendered("network-policy-values.yaml")
    monitoring = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    for name, port in (("control-plane", "metrics"), ("attention-node", "metrics-0")):
        assert "from" not in rule_for(everyone, name, port)
        assert rule_for(named, name, port)["from"] == [{"namespaceSelector": monitoring}]


def test_ports_in_policies_are_ports_of_the_pods() -> None:
    manifests = rendered("network-policy-values.yaml")
    for owner, spec in pod_specs(manifests):
        if not owner.startswith(("Deployment", "StatefulSet")):
            continue
        named = {port["name"] for each in spec["containers"] for port in each["ports"]}
        opened = [each["port"] for rule in rules(manifests, owner[-9:]) for each in rule["ports"]]
        assert {port for port in opened if isinstance(port, str)} == named - {"health-0"}


def test_pods_of_the_example_job_carry_the_labels_that_let_them_in() -> None:
    manifests = rendered("network-policy-values.yaml", "networkPolicy.jobPodLabels.tenant=a")
    template = only(manifests, "JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"][
        "template"
    ]
    wanted = {"distca.dev/role": "trainer", "tenant": "a"}
    assert wanted.items() <= template["metadata"]["labels"].items()
    (peer, *_) = rule_for(manifests, "attention-node", "data-0")["from"]
    assert peer["podSelector"]["matchLabels"] == wanted


def test_nodes_reach_the_pods_of_jobs_since_ucx_connects_both_ways() -> None:
    rule = rule_for(rendered("network-policy-values.yaml"), "jobs", 7800)
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "attention-node"


def test_the_test_pod_may_call_the_control_plane() -> None:
    manifests = rendered()
    labels = only(manifests, "Pod")["metadata"]["labels"]
    peers = rule_for(manifests, "control-plane", "grpc")["from"]
    assert any(peer["podSelector"]["matchLabels"].items() <= labels.items() for peer in peers)
    assert container(only(manifests, "Pod")["spec"], "health")["args"][1].endswith(".svc:7700")
