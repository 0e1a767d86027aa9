"""Ports: those of a pod differ, end at 65535, and stay out of the range that UCX opens itself."""

from __future__ import annotations

import pytest

from tests.deploy.helm.chart import Manifest, only, refusal, rendered

NAMES = ("data", "health", "metrics")


def ports_of_servers(*settings: str) -> list[dict[str, int]]:
    """Ports of each server of a pod, by name; its arguments, container and Service agree."""
    manifests = rendered("", "attentionNode.kind=DaemonSet", *settings)
    service = {
        port["name"]: port["port"]
        for port in only(manifests, "Service", "attention-node")["spec"]["ports"]
    }
    servers: list[Manifest] = only(manifests, "DaemonSet")["spec"]["template"]["spec"]["containers"]
    found = []
    for index, server in enumerate(servers):
        by_name = {port["name"]: port["containerPort"] for port in server["ports"]}
        assert by_name == {f"{name}-{index}": service[f"{name}-{index}"] for name in NAMES}
        for name in NAMES:
            assert f"--{name}-port={by_name[f'{name}-{index}']}" in server["args"]
        (address,) = (
            each["value"] for each in server["env"] if each["name"] == "DISTCA_HEALTH_ADDRESS"
        )
        assert address == f"$(POD_IP):{by_name[f'health-{index}']}"
        found.append({name: by_name[f"{name}-{index}"] for name in NAMES})
    return found


def test_sixteen_servers_of_a_pod_stay_out_of_the_ports_that_ucx_opens() -> None:
    servers = ports_of_servers("attentionNode.serversPerPod=16")
    assert [server["data"] for server in servers] == [
        *range(7710, 7800, 10),
        *range(7900, 7970, 10),
    ]
    for server in servers:
        assert (server["health"], server["metrics"]) == (server["data"] + 1, server["data"] + 2)
    assert len({port for server in servers for port in server.values()}) == 48


def test_the_ports_of_a_server_do_not_depend_on_how_many_follow() -> None:
    all_of_them = ports_of_servers("attentionNode.serversPerPod=16")
    for n_servers in (1, 2, 8, 9, 10):
        servers = ports_of_servers(f"attentionNode.serversPerPod={n_servers}")
        assert servers == all_of_them[:n_servers]


@pytest.mark.parametrize(
    ("ucx", "data", "health", "metrics"),
    [
        # Past the range for one port may be in it for another.
        ("7722-7735", 7710, 7711, 7712),
        ("7725-7741", 7718, 7702, 7713),
        ("7715-7715", 7705, 7711, 7712),
        ("8000-8099", 7995, 7996, 7887),
    ],
)
def test_all_three_ports_pass_over_any_range(
    ucx: str, data: int, health: int, metrics: int
) -> None:
    first, last = map(int, ucx.split("-"))
    settings = [f"ucx.tcpPortRange={ucx}", "attentionNode.serversPerPod=2"]
    given = {"data": data, "health": health, "metrics": metrics}
    settings += [f"attentionNode.ports.{name}={port}" for name, port in given.items()]
    before, after = ports_of_servers(*settings)
    assert before == given
    assert not [port for port in after.values() if first <= port <= last]
    (offset,) = {after[name] - before[name] for name in NAMES}
    assert offset % 10 == 0
    assert offset > 10


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        (
            ["attentionNode.ports.data=7805"],
            ["attentionNode.ports.data is 7805", "ucx.tcpPortRange 7800-7899 holds it"],
        ),
        (
            ["attentionNode.ports.data=7712"],
            ["attentionNode.ports.metrics is 7712", "with attentionNode.ports.data server 0 too"],
        ),
        (
            ["attentionNode.ports.health=7720", "attentionNode.serversPerPod=2"],
            ["server 1 of a pod has port 7720", "with attentionNode.ports.health server 0 too"],
        ),
        (
            ["attentionNode.ports.data=65530", "attentionNode.serversPerPod=2"],
            ["server 1 of a pod has port 65540; ports end at 65535", "serversPerPod (2)"],
        ),
        (
            ["ucx.tcpPortRange=7713-65535", "attentionNode.serversPerPod=2"],
            ["attentionNode.ports.data is 7710, with which server 1", "ports end at 65535"],
        ),
        (
            ["controlPlane.metricsPort=7700"],
            ["controlPlane.metricsPort is 7700 and controlPlane.service.port too"],
        ),
        (
            ["ucx.tcpPortRange=70000-80000"],
            ['ucx.tcpPortRange is "70000-80000"; ports end at 65535'],
        ),
        (
            ["ucx.env.UCX_TCP_PORT_RANGE=1-2"],
            ['ucx.env has UCX_TCP_PORT_RANGE "1-2"', "give the latter alone"],
        ),
        *(
            (
                [f"{part}.extraEnv[0].name=UCX_TCP_PORT_RANGE,{part}.extraEnv[0].value=1-2"],
                [f"{part}.extraEnv has UCX_TCP_PORT_RANGE", "give the latter alone"],
            )
            for part in ("attentionNode", "exampleJob")
        ),
        (
            ["exampleJob.enabled=true", "exampleJob.metricsPort=7799", "exampleJob.ranksPerNode=8"],
            ["exampleJob.metricsPort is 7799", "ports up to 7806; ucx.tcpPortRange 7800-7899"],
        ),
        (
            [
                "exampleJob.enabled=true",
                "exampleJob.metricsPort=65530",
                "exampleJob.ranksPerNode=8",
            ],
            ["exampleJob.metricsPort is 65530", "ports up to 65537; ports end at 65535"],
        ),
        (
            [
                "exampleJob.enabled=true",
                "exampleJob.metricsPort=29395",
                "exampleJob.ranksPerNode=8",
            ],
            ["exampleJob.metricsPort is 29395", "at 29400 torchrun's pods meet"],
        ),
    ],
)
def test_ports_that_would_not_go_together_are_refused(
    settings: list[str], messages: list[str]
) -> None:
    said = refusal(*settings)
    assert all(message in said for message in messages), said


def test_ports_of_what_is_not_installed_are_left_alone() -> None:
    rendered("", "exampleJob.metricsPort=7800")
    rendered("", "attentionNode.enabled=false", "attentionNode.ports.data=7712")
    elsewhere = ("controlPlane.enabled=false", "controlPlane.address=a:1")
    rendered("", *elsewhere, "controlPlane.metricsPort=7700")
