"""Alerts that fire, and end, in a real Prometheus, as what they warn of happens to containers.

promtool has the same alerts on series that somebody has written (tests/service/monitoring).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.compose_project import SERVICES, ComposeProject, wait_until
from tests.deploy.docker_engine import Docker
from tests.deploy.prometheus_api import Prometheus

pytestmark = pytest.mark.timeout(1500)

FIRES_WITHIN = 120.0
ENDS_WITHIN = 120.0
FORGOTTEN_WITHIN = 420.0
"""The window of five minutes that some alerts look back, and what they are late anyway."""
AFTER_A_JOB = 150.0
"""Longer than the wait of any alert for what has gone."""

N_NODES = 2
FOR_EVER = 1_000_000
FEW_STEPS = 600
"""Of tiny batches: three minutes or more."""
UNEVEN = (
    "--tokens-per-rank=512 --tolerance=0.001 --min-forward-tokens=256 --min-backward-tokens=256"
)
"""Nothing may be cut, so three servers cannot have equal shares of what two ranks have."""

NEARLY_OVER = """
from datetime import timedelta
from pathlib import Path
from distca.apps.certs.folder import CertificateFolder
from distca.contract.identity import Identity, Role

folder = CertificateFolder(Path("/certificates"), force=True)
identity = Identity(role=Role.CONTROL_PLANE, name="default")
authority = folder.authority(timedelta(days=365))
folder.add("control-plane", authority.issue(
    identity, names=["control-plane", "localhost"],
    starts_in=timedelta(days=-9), lifetime=timedelta(days=1),
))
"""


@dataclass(frozen=True)
class Job:
    """A training job and the Prometheus that watches it."""

    project: ComposeProject
    prometheus: Prometheus

    def wait_until_fires(self, alert: str, within: float = FIRES_WITHIN) -> None:
        begun = time.monotonic()
        wait_until(lambda: alert in self.prometheus.firing_alerts(), within, alert, self._explain)
        print(f"{alert} fires after {time.monotonic() - begun:.0f} s")

    def wait_until_ended(self, alert: str, within: float = ENDS_WITHIN) -> None:
        begun = time.monotonic()
        wait_until(
            lambda: alert not in self.prometheus.firing_alerts(),
            within,
            f"end of {alert}",
            self._explain,
        )
        print(f"{alert} has ended after {time.monotonic() - begun:.0f} s")

    def wait_for_more_steps(self) -> None:
        self.project.wait_for_step(self.project.steps_done() + 3)

    def _explain(self) -> str:
        return f"{self.prometheus.firing_alerts()}\n{self.project.tails()}"


@pytest.fixture(scope="module")
def job(docker: Docker, checkout: Path, compose_environ: dict[str, str]) -> Iterator[Job]:
    """A job without an end, under mutual TLS."""
    environ = {**compose_environ, "DISTCA_STEPS": str(FOR_EVER)}
    overrides = ("compose.mtls.yaml",)
    with ComposeProject(docker, checkout, "distca-alerts", environ, overrides) as project:
        project.up(nodes=N_NODES, services=("certificates", *SERVICES))
        prometheus = Prometheus(project.prometheus)
        started = Job(project, prometheus)
        project.wait_for_step(3)
        wait_until(lambda: _all_up(prometheus), 60, "scrape of every target", project.tails)
        assert prometheus.firing_alerts() == set()
        yield started


def test_a_control_plane_that_vanishes(job: Job) -> None:
    control_plane = job.project.container("control-plane")
    job.project.docker("kill", control_plane)
    job.wait_until_fires("DistcaControlPlaneDown")
    job.project.docker("start", control_plane)
    job.wait_until_ended("DistcaControlPlaneDown")
    job.wait_for_more_steps()


def test_no_server_while_a_job_is_open(job: Job) -> None:
    nodes = job.project.containers("attention-node")
    _all_at_once("stop", nodes, job)
    job.wait_until_fires("DistcaNoServers")
    _all_at_once("start", nodes, job)
    job.wait_until_ended("DistcaNoServers")
    job.wait_for_more_steps()


def test_a_job_that_finishes_no_steps(job: Job) -> None:
    """Its ranks keep their leases, but do not reach each other."""
    one, other = (job.project.container(f"trainer-{rank}") for rank in (0, 1))
    networks = job.project.docker.inspect(other)["NetworkSettings"]["Networks"]
    (address,) = (network["IPAddress"] for network in networks.values())
    _route(job, one, "add", address)
    try:
        job.wait_until_fires("DistcaJobStalled")
    finally:
        _route(job, one, "del", address)
    # TCP waits longer before each try, up to two minutes.
    job.wait_until_ended("DistcaJobStalled", within=240.0)
    job.wait_for_more_steps()


def test_a_certificate_that_ends_soon(job: Job) -> None:
    image = job.project.docker.inspect(job.project.container("control-plane"))["Config"]["Image"]
    folder = f"--volumes-from={job.project.container('certificates')}"
    job.project.docker(
        "run", "--rm", folder, "--entrypoint=/opt/distca/bin/python", image, "-c", NEARLY_OVER
    )
    job.wait_until_fires("DistcaCertificateExpires")
    job.project.docker("start", "--attach", job.project.container("certificates"))
    job.wait_until_ended("DistcaCertificateExpires")
    job.wait_for_more_steps()


def test_a_tolerance_that_is_not_kept_and_a_job_that_has_finished(
    docker: Docker, checkout: Path, compose_environ: dict[str, str]
) -> None:
    steps = {"DISTCA_STEPS": str(FEW_STEPS), "DISTCA_TRAIN_ARGS": UNEVEN}
    environ = {**compose_environ, **steps}
    with ComposeProject(docker, checkout, "distca-uneven", environ) as project:
        project.up(nodes=3)
        job = Job(project, Prometheus(project.prometheus))
        project.wait_for_step(1)
        job.wait_until_fires("DistcaPlansAboveTolerance")
        assert project.wait_for_trainers() == [0, 0], project.tails()
        ended = time.monotonic()
        of_balance = {"DistcaPlansAboveTolerance", "DistcaImbalanceAboveTolerance"}
        while (firing := job.prometheus.firing_alerts()) or time.monotonic() < ended + AFTER_A_JOB:
            assert firing <= of_balance, "a job that has finished is no fault"
            assert time.monotonic() < ended + FORGOTTEN_WITHIN, firing
            time.sleep(1.0)


def _all_up(prometheus: Prometheus) -> bool:
    targets = prometheus.targets()
    n_expected = 2 + 2 + N_NODES  # Prometheus and the control plane, trainers, nodes
    return len(targets) == n_expected and all(each["health"] == "up" for each in targets)


def _all_at_once(command: str, containers: list[str], job: Job) -> None:
    with ThreadPoolExecutor(len(containers)) as pool:
        list(pool.map(lambda each: job.project.docker(command, each), containers))


def _route(job: Job, container: str, action: str, address: str) -> None:
    """Drops, or no longer, what ``container`` sends to ``address``."""
    pid = job.project.docker.inspect(container)["State"]["Pid"]
    subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "route", action, "blackhole", address],
        check=True,
        capture_output=True,
        timeout=30,
    )
