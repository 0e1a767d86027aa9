"""``distca doctor`` against real control planes, certificates, nodes and other doctors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distca.apps.doctor.cluster_probe import ClusterProbe
from distca.apps.doctor.examination import CHECKS, examine
from distca.apps.doctor.finding import CheckFinding, Severity
from distca.apps.doctor.settings import DoctorSettings
from distca.apps.doctor.surroundings import Surroundings
from distca.contract.identity import Role
from distca.contract.rpc import RpcSettings
from tests.service.security.pki import Pki
from tests.support import preloaded
from tests.support.programs import ran
from tests.support.service_harness import client_of, running

PASS, WARN, FAIL = Severity.PASS, Severity.WARN, Severity.FAIL


def doctor(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs the real command in a process of its own, where it alone loads UCX."""
    return ran(
        sys.executable,
        "-m",
        "distca",
        "doctor",
        *arguments,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "OMP_NUM_THREADS": "1", **environ},
    )


def preloaded_doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs what has nothing to do with UCX."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    return preloaded.run(
        preloaded.DISTCA, "doctor", *arguments, environment=environment, timeout=100
    )


def around(address: str = "", **settings: Any) -> Surroundings:
    """Surroundings with the control plane at ``address``, if that is given."""
    connect_seconds = settings.pop("connect_seconds", 5.0)
    tls = {name: settings.pop(name) for name in list(settings) if name.endswith(("_file", "_name"))}
    cluster = (
        ClusterProbe(RpcSettings(address=address, **tls), connect_seconds) if address else None
    )
    return Surroundings(settings=DoctorSettings(**settings), cluster=cluster)


def findings(check: str, where: Surroundings) -> list[CheckFinding]:
    return list(CHECKS[check](where))


def says(check: str, where: Surroundings, status: Severity) -> str:
    """What the check's only finding of ``status`` says; there may be others of other status."""
    (finding,) = (each for each in findings(check, where) if each.status is status)
    return finding.says


# The control plane.


def test_a_control_plane_that_answers_passes_with_clock_and_versions() -> None:
    with running() as control_plane, client_of(control_plane.address) as client:
        client.register("node-a")
        where = around(control_plane.address)
        assert "1 servers, 0 jobs" in says("control-plane", where, PASS)
        (clock,) = findings("clock", where)
        # The same clock; the call takes milliseconds, on a busy machine perhaps a hundred.
        assert abs(float(clock.figures["seconds"])) < 1.0
        assert "the same distca everywhere" in says("versions", where, PASS)


def test_nobody_there_fails_once_and_the_checks_that_need_it_say_nothing() -> None:
    where = Surroundings(
        settings=DoctorSettings(), cluster=ClusterProbe(RpcSettings(address="127.0.0.1:1"), 0.5)
    )
    assert "Connection refused" in says("control-plane", where, FAIL)
    assert findings("clock", where) == []


@pytest.mark.parametrize("host", ["nowhere.invalid", "node..example"])
def test_a_name_that_does_not_resolve_fails(host: str) -> None:
    for where in (
        around(f"{host}:7700", data_host="127.0.0.1", one_host=True),
        around(data_host=host),
    ):
        assert FAIL in [finding.status for finding in findings("dns", where)]


# Certificates.


def localhost(address: str) -> str:
    """``address`` under the name that certificates have."""
    return f"localhost:{address.rpartition(':')[2]}"


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


def test_good_certificates_pass_and_a_role_that_may_not_look_learns_nothing(pki: Pki) -> None:
    with running(tls=pki.issue(Role.CONTROL_PLANE).for_server()) as control_plane:
        operator, trainer = (
            around(localhost(control_plane.address), **pki.issue(role).for_client())
            for role in (Role.OPERATOR, Role.TRAINER)
        )
        assert [finding.status for finding in findings("control-plane", operator)] == [PASS]
        assert "tells this role nothing" in says("control-plane", trainer, PASS)
        assert findings("clock", trainer) == []


def test_a_key_of_another_certificate_fails(pki: Pki) -> None:
    other = pki.issue(Role.SERVER).key_file
    where = around("localhost:1", **pki.issue(Role.OPERATOR).for_client() | {"key_file": other})
    assert str(other) in says("control-plane", where, FAIL)


# UCX.


def test_the_self_test_measures_network_and_shared_memory() -> None:
    before = set(os.listdir("/dev/shm"))
    version, network, memory = findings("ucx", around(data_host="127.0.0.1"))
    assert version.says.startswith("ucxx ")
    assert (network.status, memory.status) == (PASS, PASS)
    assert "tcp" in repr(network.figures["lanes"])
    assert "posix" in repr(memory.figures["lanes"])
    assert float(network.figures["gigabytes_per_second"]) > 0
    left = {name for name in set(os.listdir("/dev/shm")) - before if "ucx" in name}
    assert not left, "UCX leaves segments behind only when a process is killed"


def test_transports_that_do_not_exist_fail_in_words() -> None:
    checked = doctor("--one-host", *skipping("ucx"), "--json", UCX_TLS="nonsense")
    assert checked.returncode == 1
    told = json.loads(checked.stdout)
    assert told["status"] == "fail"
    assert [finding["status"] for finding in told["findings"]] == ["pass", "fail", "fail"]


def test_without_ucxx_the_check_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", None)
    (finding,) = findings("ucx", around(transport="ucxx"))
    assert (finding.status, "ucxx-cu13" in finding.advice) == (FAIL, True)


def skipping(*kept: str) -> list[str]:
    """Options that leave out every check but ``kept``."""
    return [f"--skip={name}" for name in CHECKS if name not in kept]


# The command.


def test_a_healthy_cpu_node_is_fit(tmp_path: Path) -> None:
    """Shared memory depends on the machine that runs the tests, so it is left out."""
    with running() as control_plane, client_of(control_plane.address) as client:
        client.register("node-a", data_address="127.0.0.1:1")
        checked = doctor(
            f"--control-plane={control_plane.address}",
            "--shape=4:2:16:float32",
            "--data-host=127.0.0.1",
            "--one-host",
            "--no-pool",
            "--skip=shared-memory",
            "--skip=namespaces",
            "--skip=rdma",
            UCX_LOG_LEVEL="info",
        )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "UCX  INFO" in checked.stderr
    lines = [line for line in checked.stdout.splitlines() if not line.startswith(" ")]
    assert {line.split()[0] for line in lines[:-1]} <= {"PASS", "WARN"}
    # Plaintext is the one thing to look at.
    assert lines[-1].endswith("1 to look at, 0 failed")


def test_every_device_that_is_named_is_checked() -> None:
    settings = DoctorSettings(
        device="cpu", also_devices=("cuda:7",), skip=frozenset(CHECKS.keys() - {"gpu", "kernels"})
    )
    found = [
        (each.check, each.says.partition(": ")[0], each.status)
        for each in examine(Surroundings(settings=settings))
    ]
    for check in ("gpu", "kernels"):
        assert (check, "cpu", PASS) in found
        assert (check, "cuda:7", FAIL) in found


def test_strict_fails_for_warnings() -> None:
    only_dns = [*skipping("dns"), "--data-host=127.0.0.1"]
    assert preloaded_doctor(*only_dns).returncode == 0
    assert preloaded_doctor(*only_dns, "--strict").returncode == 1
