"""Attention nodes: workload, devices, shared memory, end of a pod, scaling."""

from __future__ import annotations

import pytest

from tests.deploy.helm.chart import (
    VALUE_SETS,
    Manifest,
    container,
    containers,
    environment,
    kinds,
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


def arguments(of: Manifest) -> dict[str, str]:
    """``--name=value`` arguments of a container."""
    pairs = (each.partition("=") for each in of["args"] if each.startswith("--"))
    return {name: value for name, _, value in pairs}


def test_a_stateful_set_with_a_headless_service_by_default() -> None:
    manifests = rendered()
    workload = only(manifests, "StatefulSet")
    service = only(manifests, "Service", "attention-node")
    assert workload["spec"]["serviceName"] == service["metadata"]["name"]
    assert workload["spec"]["podManagementPolicy"] == "Parallel"
    assert service["spec"]["clusterIP"] == "None"
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    ports = {port["name"] for port in container(pod(), "server-0")["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == ports


def test_a_daemon_set_serves_each_gpu_of_a_machine() -> None:
    manifests = rendered("daemonset-values.yaml")
    assert "StatefulSet" not in kinds(manifests)
    spec = only(manifests, "DaemonSet")["spec"]
    assert "replicas" not in spec
    assert "serviceName" not in spec
    servers = spec["template"]["spec"]["containers"]
    assert len(servers) == 8
    assert all(server["resources"]["limits"]["nvidia.com/gpu"] == 1 for server in servers)
    for option in ("--data-port", "--health-port", "--metrics-port", "--server-id"):
        assert len({arguments(server)[option] for server in servers}) == 8, option
    named = [port["name"] for server in servers for port in server["ports"]]
    assert len(set(named)) == 24
    assert all(len(name) <= 15 for name in named)


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


def test_a_pool_may_be_a_deployment_that_scales() -> None:
    manifests = rendered("rolling-update-values.yaml")
    workload = only(manifests, "Deployment", "attention-node")
    assert workload["spec"]["replicas"] == 16
    assert not {"serviceName", "podManagementPolicy"} & set(workload["spec"])
    for value_set, kind in (
        ("autoscaling-hpa-values.yaml", "HorizontalPodAutoscaler"),
        ("autoscaling-keda-values.yaml", "ScaledObject"),
    ):
        scaled = rendered(value_set, "attentionNode.kind=Deployment")
        target = only(scaled, kind)["spec"]["scaleTargetRef"]
        assert target["kind"] == "Deployment"
        assert target["name"] == only(scaled, "Deployment", "attention-node")["metadata"]["name"]
        assert "replicas" not in only(scaled, "Deployment", "attention-node")["spec"]


def test_each_server_gets_a_gpu_and_its_argument_says_so() -> None:
    server = container(pod(), "server-0")
    assert server["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert server["resources"]["requests"]["nvidia.com/gpu"] == 1
    assert arguments(server)["--device"] == "cuda:0"


def test_rdma_is_a_resource_by_value_with_memory_locked_and_ucx_told() -> None:
    server = container(pod("rdma-values.yaml"), "server-0")
    assert server["resources"]["limits"]["rdma/hca_shared_devices_a"] == 1
    assert server["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    env = environment(server)
    assert env["UCX_TLS"] == "rc,tcp,self,cuda_copy,cuda_ipc"
    assert env["UCX_IB_ADDR_TYPE"] == "eth"
    assert env["UCX_NET_DEVICES"] == "mlx5_0:1"
    assert env["UCX_LOG_LEVEL"] == "info"
    assert env["RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"] == "true"
    without = container(pod(), "server-0")
    assert "add" not in without["securityContext"]["capabilities"]
    assert set(environment(without)) & {"UCX_TLS", "UCX_IB_ADDR_TYPE"} == set()


@pytest.mark.parametrize("transport", ["auto", "nixl"])
def test_node_doctor_and_job_are_given_one_transport(transport: str) -> None:
    settings = ["exampleJob.enabled=true", *([] if transport == "auto" else ["transport=nixl"])]
    given = {
        each["name"]: [text for text in each["args"] if text.startswith("--transport")]
        for owner, spec in pod_specs(rendered("rdma-values.yaml", *settings))
        for each in containers(spec)
        if {"attention-node", "doctor", "train"} & set(each["args"])
    }
    expected = [f"--transport={transport}"]
    assert given == {"server-0": expected, "doctor": expected, "node": expected}


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


def test_shared_memory_lies_in_memory_and_is_limited() -> None:
    spec = pod("", "attentionNode.sharedMemorySize=3Gi")
    (shm,) = (volume for volume in spec["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "3Gi"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in container(spec, "server-0")["volumeMounts"]


def test_the_namespaces_of_the_machine_are_opt_in() -> None:
    for name in ("hostIPC", "hostPID", "hostNetwork"):
        assert name not in pod()
        settings = [f"attentionNode.{name}=true", "attentionNode.kind=DaemonSet"]
        opted_in = pod("", *settings, "networkPolicy.enabled=false")
        assert opted_in[name] is True
    assert opted_in["dnsPolicy"] == "ClusterFirstWithHostNet"


@pytest.mark.parametrize("drain_seconds", [1, 30, 600])
def test_the_grace_period_is_longer_than_the_drain(drain_seconds: int) -> None:
    spec = pod("", f"attentionNode.drainSeconds={drain_seconds}")
    server = container(spec, "server-0")
    assert float(arguments(server)["--drain-seconds"]) == drain_seconds
    assert spec["terminationGracePeriodSeconds"] >= drain_seconds + 15


def test_the_address_is_the_pods_own_and_the_name_is_the_pods() -> None:
    server = container(pod(), "server-0")
    assert arguments(server)["--data-host"] == "$(POD_IP)"
    assert arguments(server)["--server-id"] == "$(POD_NAME)"
    env = environment(server)
    assert env["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    # $(POD_IP) in an environment variable is expanded only if POD_IP stands before it.
    names = list(env)
    assert names.index("POD_IP") < names.index("DISTCA_HEALTH_ADDRESS")
    assert names.index("DISTCA_CONTROL_PLANE") < len(names)


def test_the_doctor_sees_the_same_devices_volumes_and_variables_as_the_server() -> None:
    asked = {"DISTCA_HEALTH_ADDRESS"}
    for value_set, of_health in (
        ("", asked),
        ("rdma-values.yaml", asked),
        ("mtls-own-authority-values.yaml", {*asked, "DISTCA_HEALTH_TLS_SERVER_NAME"}),
    ):
        spec = pod(value_set)
        doctor, server = container(spec, "doctor"), container(spec, "server-0")
        for same in ("image", "resources", "volumeMounts", "securityContext"):
            assert doctor[same] == server[same]
        differing = set(environment(server)) ^ set(environment(doctor))
        assert differing == of_health
    assert "--rdma" in container(pod("rdma-values.yaml"), "doctor")["args"]


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


@pytest.mark.parametrize("value_set", ["daemonset-values.yaml", "mtls-own-authority-values.yaml"])
def test_probes_ask_each_server_at_its_metrics_port(value_set: str) -> None:
    servers = [each for each in pod(value_set)["containers"] if each["name"].startswith("server-")]
    for index, server in enumerate(servers):
        port = f"metrics-{index}"
        for name in ("startupProbe", "readinessProbe"):
            assert server[name]["httpGet"] == {"path": "/readyz", "port": port}
        assert server["livenessProbe"]["httpGet"] == {"path": "/livez", "port": port}


def test_distca_health_in_the_container_finds_the_health_port_and_the_certificate() -> None:
    server = container(pod("mtls-own-authority-values.yaml"), "server-0")
    assert environment(server)["DISTCA_HEALTH_ADDRESS"] == "$(POD_IP):7711"
    assert environment(server)["DISTCA_TLS_KEY"] == "/etc/distca/tls/tls.key"
    # Of health alone: to the control plane the node goes by the name of its Service.
    assert environment(server)["DISTCA_HEALTH_TLS_SERVER_NAME"] == "localhost"
    assert "DISTCA_TLS_SERVER_NAME" not in environment(server)


def test_autoscaling_owns_the_number_of_pods() -> None:
    manifests = rendered("autoscaling-hpa-values.yaml")
    assert "replicas" not in only(manifests, "StatefulSet")["spec"]
    spec = only(manifests, "HorizontalPodAutoscaler")["spec"]
    assert spec["scaleTargetRef"]["name"] == only(manifests, "StatefulSet")["metadata"]["name"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 16)
    (metric,) = spec["metrics"]
    assert metric["pods"]["target"] == {"type": "AverageValue", "averageValue": "8"}
    down = spec["behavior"]["scaleDown"]["policies"][0]
    drained = pod("autoscaling-hpa-values.yaml")["terminationGracePeriodSeconds"]
    assert (down["value"], down["periodSeconds"]) == (1, drained)


def test_keda_asks_prometheus_for_the_queue_of_these_pods() -> None:
    manifests = rendered("autoscaling-keda-values.yaml")
    assert "HorizontalPodAutoscaler" not in kinds(manifests)
    spec = only(manifests, "ScaledObject")["spec"]
    assert spec["scaleTargetRef"]["name"] == only(manifests, "StatefulSet")["metadata"]["name"]
    (trigger,) = spec["triggers"]
    of_these = '{namespace="research",pod=~"rel-distca-attention-node-.*"}'
    query = f"sum(rate(distca_attention_node_queue_seconds_total{of_these}[2m]))"
    assert trigger["metadata"]["query"] == query
    assert trigger["metadata"]["threshold"] == "8"
