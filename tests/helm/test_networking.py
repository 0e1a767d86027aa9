"""NetworkPolicies: who reaches the control plane, the data plane and the metrics."""

from __future__ import annotations

from tests.helm.chart import (
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


def test_there_is_none_unless_asked_for() -> None:
    assert "NetworkPolicy" not in kinds(rendered())


def test_only_pods_of_jobs_reach_the_data_plane() -> None:
    rule = rule_for(rendered("", "networkPolicy.enabled=true"), "attention-node", "data-0")
    assert rule["from"] == [{"podSelector": JOB_PODS}]
    assert {"protocol": "TCP", "port": 7800, "endPort": 7899} in rule["ports"]


def test_the_ports_that_open_are_those_that_ucx_is_told_to_use() -> None:
    settings = ["networkPolicy.enabled=true", "ucx.tcpPortRange=9000-9009"]
    manifests = rendered("", *settings, "exampleJob.enabled=true")
    for name in ("attention-node", "example"):
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
    peers = rule_for(rendered("", "networkPolicy.enabled=true"), "control-plane", "grpc")["from"]
    assert peers == [{"podSelector": release}, {"podSelector": JOB_PODS}]
    named = rule_for(rendered("network-policy-values.yaml"), "control-plane", "grpc")["from"]
    assert {"podSelector": {"matchLabels": {"app": "operator-shell"}}} in named


def test_metrics_are_open_to_all_unless_scrapers_are_named() -> None:
    everyone = rendered("", "networkPolicy.enabled=true")
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


def test_nodes_reach_the_example_jobs_pods_since_ucx_connects_both_ways() -> None:
    rule = rule_for(rendered("network-policy-values.yaml"), "example", 7800)
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "attention-node"


def test_the_test_pod_may_call_the_control_plane() -> None:
    manifests = rendered("", "networkPolicy.enabled=true")
    labels = only(manifests, "Pod")["metadata"]["labels"]
    peers = rule_for(manifests, "control-plane", "grpc")["from"]
    assert any(peer["podSelector"]["matchLabels"].items() <= labels.items() for peer in peers)
    assert container(only(manifests, "Pod")["spec"], "health")["args"][1].endswith(".svc:7700")
