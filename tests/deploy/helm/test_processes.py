"""What the chart renders really runs: control plane, doctor, nodes, `helm test`, example job, and
the end of a pod, as processes with the manifests' own arguments, variables and probes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent import futures
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc

from distca.apps.certs.authority import Authority, Signed
from distca.contract.identity import Identity, Role
from distca.process.health_service import HealthCheck
from tests.deploy.helm.chart import Manifest, container, environment, pod_specs, rendered
from tests.deploy.helm.pods import Machine, free_port

START_SECONDS = 240.0
"""Several processes that import PyTorch, on two busy cores."""

ROLES = {
    "control-plane": Role.CONTROL_PLANE,
    "attention-node": Role.SERVER,
    "trainer": Role.TRAINER,
    "operator": Role.OPERATOR,
}


class Release:
    """A rendered release of the CPU values, with free ports and the example job."""

    def __init__(self, *settings: str) -> None:
        first, port = 21000 + free_port() % 8000, free_port()
        self.address = f"localhost:{port}"
        self.rank_metrics_port = first + 30
        self.manifests = rendered(
            "cpu-values.yaml",
            f"controlPlane.service.port={port}",
            f"controlPlane.metricsPort={free_port()}",
            "attentionNode.replicas=1",
            "attentionNode.serversPerPod=2",
            f"attentionNode.ports.data={first}",
            f"attentionNode.ports.health={first + 1}",
            f"attentionNode.ports.metrics={first + 2}",
            f"ucx.tcpPortRange={first + 100}-{first + 199}",
            "exampleJob.enabled=true",
            f"exampleJob.metricsPort={self.rank_metrics_port}",
            "exampleJob.args={--steps=3,--tokens-per-rank=512,--min-backward-tokens=64}",
            *settings,
        )

    @property
    def meeting_host(self) -> str:
        """The name by which pods of the example job find the first."""
        host = environment(container(self.pod("JobSet"), "node"))["PET_MASTER_ADDR"]
        assert isinstance(host, str)
        return host

    def pod(self, kind: str) -> Manifest:
        """The pod spec of the workload of ``kind``."""
        (spec,) = (s for owner, s in pod_specs(self.manifests) if owner.startswith(f"{kind} "))
        return spec


def machine_for(folder: Path, release: Release, role: str) -> Machine:
    """A machine on which a pod with this role's Secret runs."""
    (folder / "token").mkdir(parents=True, exist_ok=True)
    (folder / "token/secret").write_bytes(b"x" * 48)
    (folder / "token/secret").chmod(0o440)
    (folder / "home").mkdir(exist_ok=True)
    (folder / "runs").mkdir(exist_ok=True)
    control_plane = "rel-distca-control-plane.research.svc:"
    return Machine(
        folder,
        {
            f"{control_plane}{release.address.rpartition(':')[2]}": release.address,
            release.meeting_host: "127.0.0.1",
            "/var/lib/distca": str(folder / "home"),
            "/runs/": f"{folder / 'runs'}/",
            "/etc/distca/token": str(folder / "token"),
            "/etc/distca/tls": str(folder / "tls" / role),
        },
    )


def make_certificates(folder: Path, release: Release) -> None:
    """What cert-manager would write into the Secrets: with the names and URIs of the manifests."""
    authority = Authority.make(timedelta(days=1))
    for part, role in ROLES.items():
        (spec,) = (
            manifest["spec"]
            for manifest in release.manifests
            if manifest["kind"] == "Certificate"
            and manifest["metadata"]["name"] == f"rel-distca-{part}"
        )
        identity = Identity(role=role, name=spec["uris"][0].rpartition("/")[2])
        names = spec.get("dnsNames", [])
        signed: Signed = authority.issue(identity, lifetime=timedelta(hours=1), names=names)
        target = folder / "tls" / part
        target.mkdir(parents=True)
        (target / "tls.crt").write_bytes(signed.certificate)
        (target / "tls.key").write_bytes(signed.key)
        (target / "ca.crt").write_bytes(authority.pem.certificate)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """Machines that were used; all that runs on them ends with the test."""
    used: list[Machine] = []
    yield used
    for machine in reversed(used):
        machine.close()


def test_distca_health_in_a_nodes_container_accepts_its_certificate(
    tmp_path: Path, machines: list[Machine]
) -> None:
    """Which is for localhost, while the health port is at the pod's address alone."""
    release = Release("tls.mode=certManager")
    make_certificates(tmp_path, release)
    node = container(release.pod("StatefulSet"), "server-0")
    machine = machine_for(tmp_path, release, "attention-node")
    machines.append(machine)
    machine.replaced |= {"127.0.0.1:": "127.0.0.2:"}
    port = environment(node)["DISTCA_HEALTH_ADDRESS"].rpartition(":")[2]

    files = tmp_path / "tls" / "attention-node"
    pair = ((files / "tls.key").read_bytes(), (files / "tls.crt").read_bytes())
    credentials = grpc.ssl_server_credentials(
        [pair], root_certificates=(files / "ca.crt").read_bytes(), require_client_auth=True
    )
    servicer = HealthCheck()
    servicer.serves = True
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_secure_port(f"127.0.0.2:{port}", credentials)
    server.start()
    try:
        asks = {**node, "command": ["distca"], "args": ["health"]}
        told = machine.run(asks, pod="attention-node-0", timeout_seconds=START_SECONDS)
    finally:
        server.stop(None).wait(5)
    assert told == f"127.0.0.2:{port}: SERVING\n"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tls", [False, True], ids=["plaintext", "mtls"])
def test_a_release_runs_trains_and_ends(tls: bool, tmp_path: Path, machines: list[Machine]) -> None:
    release = Release(*(["tls.mode=certManager"] if tls else []))
    if tls:
        make_certificates(tmp_path, release)

    def machine(role: str) -> Machine:
        machines.append(machine_for(tmp_path, release, role))
        return machines[-1]

    plane = machine("control-plane").start(
        container(release.pod("Deployment"), "control-plane"), pod="control-plane-0"
    )
    plane.become_ready(START_SECONDS)
    assert plane.passes("livenessProbe")

    pod = release.pod("StatefulSet")
    node_machine = machine("attention-node")
    for init in pod["initContainers"]:
        told = node_machine.run(init, pod="attention-node-0", timeout_seconds=START_SECONDS)
        assert " 0 failed" in told
    nodes = [node_machine.start(each, pod="attention-node-0") for each in pod["containers"]]
    for node in nodes:
        node.become_ready(START_SECONDS)
        assert node.passes("livenessProbe")

    test_pod, test_machine = release.pod("Pod"), machine("operator")
    for name in ("health", "servers"):
        told = test_machine.run(
            container(test_pod, name), pod="test", timeout_seconds=START_SECONDS
        )
    assert json.loads(told.splitlines()[-1])["n_serving"] == 2

    job, index = container(release.pod("JobSet"), "node"), "job-completion-index"
    meeting_port = str(free_port())
    trainers = []
    for rank in range(2):
        host = machine("trainer")
        # Pods of one Job have addresses of their own; here they share loopback.
        port = release.rank_metrics_port
        host.replaced |= {f"--metrics-port={port}": f"--metrics-port={port + rank}"}
        host.replaced |= {"29400": meeting_port}
        annotations = {f"batch.kubernetes.io/{index}": str(rank)}
        trainers.append(host.start(job, pod=f"example-node-0-{rank}", annotations=annotations))
    for trainer in trainers:
        code = trainer.wait(START_SECONDS)
        assert code == 0, trainer.log.read_text()
    run = json.loads((tmp_path / "runs/rel-distca-example/run.json").read_text())
    assert (run["finished"], run["n_ranks"], run["mode"]) == (True, 2, "pool")

    grace_seconds = pod["terminationGracePeriodSeconds"]
    for each in (*nodes, plane):
        each.popen.send_signal(signal.SIGTERM)
    for node in nodes:
        assert node.wait(grace_seconds) == 0, node.log.read_text()
    assert plane.wait(release.pod("Deployment")["terminationGracePeriodSeconds"]) == 0
