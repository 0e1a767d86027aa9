"""Ports: those of a pod differ, end at 65535, and stay out of the range that UCX opens itself."""

from __future__ import annotations

import pytest

from tests.deploy.helm.chart import Manifest, only, rendered

NAMES = ("data", "metrics")


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
        found.append({name: by_name[f"{name}-{index}"] for name in NAMES})
    return found


def test_sixteen_servers_of_a_pod_stay_out_of_the_ports_that_ucx_opens() -> None:
    servers = ports_of_servers("attentionNode.serversPerPod=16")
    assert [server["data"] for server in servers] == [
        *range(7710, 7800, 10),
        *range(7900, 7970, 10),
    ]
    for server in servers:
        assert server["metrics"] == server["data"] + 2
    assert len({port for server in servers for port in server.values()}) == 32


@pytest.mark.parametrize(
    ("ucx", "data", "metrics"),
    [
        # Past the range for one port may be in it for another.
        ("7722-7735", 7710, 7712),
        ("7725-7741", 7718, 7713),
        ("7715-7715", 7705, 7712),
        ("8000-8099", 7995, 7887),
    ],
)
def test_both_ports_pass_over_any_range(ucx: str, data: int, metrics: int) -> None:
    first, last = map(int, ucx.split("-"))
    settings = [f"ucx.tcpPortRange={ucx}", "attentionNode.serversPerPod=2"]
    given = {"data": data, "metrics": metrics}
    settings += [f"attentionNode.ports.{name}={port}" for name, port in given.items()]
    before, after = ports_of_servers(*settings)
    assert before == given
    assert not [port for port in after.values() if first <= port <= last]
    (offset,) = {after[name] - before[name] for name in NAMES}
    assert offset % 10 == 0
    assert offset > 10
