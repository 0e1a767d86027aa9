"""Each check of ``distca doctor``: what makes it pass, and what makes it warn or fail."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core_attention.kernels.cpu import CpuKernel
from core_attention.shape import AttentionShape
from data_plane import transport_facts
from data_plane.device_memory import Driver
from data_plane.transport import ProbeResult, TransportName
from distca import __version__
from distca.apps.doctor import cluster_checks, device_checks
from distca.apps.doctor.cluster_checks import compare_versions, judge_clock
from distca.apps.doctor.device_checks import judge_kernel, rehearsal_trouble
from distca.apps.doctor.examination import CHECKS, examine
from distca.apps.doctor.finding import CheckFinding, Severity, failed, passed, warned, worst
from distca.apps.doctor.machine_checks import judge_shared_memory
from distca.apps.doctor.report import as_json, summary
from distca.apps.doctor.settings import DoctorSettings
from distca.apps.doctor.surroundings import Surroundings
from distca.apps.doctor.transport_checks import judge_self_test, judge_transport
from distca.v1 import cluster_pb2, membership_pb2
from tests.support.cluster import NODE_SHAPE
from tests.support.rdma_machine import add_rdma_device

PASS, WARN, FAIL = Severity.PASS, Severity.WARN, Severity.FAIL


def around(root: Path = Path("/"), environ: dict[str, str] | None = None, **settings: Any) -> Any:
    """Surroundings without a control plane."""
    return Surroundings(settings=DoctorSettings(**settings), environ=environ or {}, root=root)


def findings(check: str, where: Surroundings) -> list[CheckFinding]:
    """What one check finds."""
    return list(CHECKS[check](where))


def only(check: str, where: Surroundings) -> CheckFinding:
    (finding,) = findings(check, where)
    return finding


def test_what_does_not_pass_says_what_to_do() -> None:
    with pytest.raises(ValueError):
        CheckFinding(status=FAIL, says="broken")
    with pytest.raises(ValueError):
        CheckFinding(status=PASS, says="well", advice="do")


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on() -> None:
    def broken(where: Surroundings) -> Iterator[CheckFinding]:
        yield passed("half of it")
        raise OSError("disk on fire")

    def well(where: Surroundings) -> Iterator[CheckFinding]:
        yield passed("done")

    found = list(examine(around(), {"broken": broken, "well": well}))
    assert [finding.status for finding in found] == [PASS, FAIL, PASS]
    assert [finding.check for finding in found] == ["broken", "broken", "well"]
    assert "the check itself broke: OSError: disk on fire" in found[1].says


def test_checks_can_be_left_out() -> None:
    found = list(examine(around(skip=frozenset(set(CHECKS) - {"shared-memory"}))))
    assert [finding.check for finding in found] == ["shared-memory"]


def test_the_worst_finding_counts_and_json_has_them_all() -> None:
    found = [passed("x", gigabytes_per_second=1.5), warned("y", "do"), passed("z")]
    assert worst(found) is WARN
    assert worst([*found, failed("u", "do")]) is FAIL
    assert worst([]) is PASS
    assert summary(found) == "2 passed, 1 to look at, 0 failed"
    told = json.loads(as_json(found))
    assert (told["status"], told["version"]) == ("warn", __version__)
    assert told["findings"][0]["figures"] == {"gigabytes_per_second": 1.5}
    assert told["findings"][1]["advice"] == "do"


def test_wrong_settings_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"device": "gpu"},
        {"also_devices": ("cpu",)},
        {"probe_seconds": 0},
        {"min_gigabytes_per_second": -1},
    ]
    for each in wrong:
        with pytest.raises(ValueError):
            DoctorSettings(**each)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch says on a machine with two H200s, half of whose memory is in use."""
    of_one = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: of_one)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((2 - index) * 70, 140))
    driver = SimpleNamespace(fabric_obstacle="no channel of IMEX")
    monkeypatch.setattr(Driver, "of", lambda index: driver)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("device", "status"),
    [("cpu", PASS), ("cuda:0", PASS), ("cuda:1", WARN), ("cuda:2", FAIL)],
)
def test_the_gpu_must_exist_and_should_be_free(device: str, status: Severity) -> None:
    found, *fabric = findings("gpu", around(device=device))
    assert found.status is status
    # Blocks without fabric handles are as good on one host.
    assert all(each.status is PASS for each in fabric)


@pytest.mark.usefixtures("two_gpus")
def test_no_gpu_fails_and_tells_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device in the container, a driver that works, or PyTorch's CUDA: each has its advice."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = [only("gpu", around(tmp_path, device="cuda:0"))]
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    found.append(only("gpu", around(tmp_path, device="cuda:0")))
    monkeypatch.setattr(torch.version, "cuda", None)
    found.append(only("gpu", around(tmp_path, device="cuda:0")))
    assert {finding.status for finding in found} == {FAIL}
    assert len({finding.advice for finding in found}) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_passes_every_check_of_the_device() -> None:
    where = around(device="cuda:0", shapes=(dataclasses.replace(NODE_SHAPE, dtype="bfloat16"),))
    for check in ("gpu", "kernels"):
        assert FAIL not in [finding.status for finding in findings(check, where)], check


def refuse(kernel: CpuKernel, shape: AttentionShape, mask: object) -> None:
    raise ValueError("head_dim is 16; valid are 64 and 128")


def cannot_run(kernel: CpuKernel, shape: AttentionShape, device: torch.device) -> None:
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize(
    ("shapes", "check", "rehearse", "status"),
    [
        ((NODE_SHAPE,), None, None, PASS),
        ((NODE_SHAPE,), refuse, None, FAIL),
        # Which can be chosen, takes the shape and cannot run: the node would not start.
        ((NODE_SHAPE,), None, cannot_run, FAIL),
        ((), None, cannot_run, FAIL),
    ],
)
def test_what_a_server_launches_before_it_serves_is_launched(
    shapes: tuple[AttentionShape, ...],
    check: Any,
    rehearse: Any,
    status: Severity,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if check is not None:
        monkeypatch.setattr(CpuKernel, "check", check)
    if rehearse is not None:
        monkeypatch.setattr(device_checks, "rehearse", rehearse)
    assert only("kernels", around(shapes=shapes)).status is status


def test_a_device_that_hangs_fails_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(device_checks, "rehearse", lambda *_: released.wait(60))
    try:
        assert rehearsal_trouble(CpuKernel(), NODE_SHAPE, torch.device("cpu"), seconds=0.2)
    finally:
        released.set()


@pytest.mark.parametrize(("device", "count"), [("cuda:0", 0), ("cuda:2", 2)])
def test_kernels_of_no_gpu_fail(device: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert only("kernels", around(device=device)).status is FAIL


@pytest.mark.parametrize(
    ("name", "capability", "status"),
    [("fa2", (9, 0), WARN), ("fa4", (9, 0), PASS), ("fa2", (8, 0), PASS), ("cpu", None, PASS)],
)
def test_a_slower_kernel_than_there_is_warns(
    name: str, capability: tuple[int, int] | None, status: Severity
) -> None:
    assert judge_kernel(name, capability, "").status is status


def test_shared_memory_is_measured(tmp_path: Path) -> None:
    assert only("shared-memory", around(tmp_path)).status is FAIL, "there is none"
    stat = os.statvfs("/dev/shm")
    size_bytes = only("shared-memory", around()).figures["size_bytes"]
    assert size_bytes == stat.f_blocks * stat.f_frsize


@pytest.mark.parametrize(
    ("free_bytes", "one_host", "status"),
    [(64 * 2**20, False, WARN), (64 * 2**20, True, FAIL), (2**30, True, PASS)],
)
def test_docker_s_default_of_shared_memory_is_too_small(
    free_bytes: int, one_host: bool, status: Severity
) -> None:
    assert judge_shared_memory(2**31, free_bytes, one_host=one_host).status is status


@pytest.mark.parametrize(
    ("pid", "ipc", "one_host", "status"),
    [
        (4026531836, 4026531839, True, PASS),
        (4026532000, 4026532001, False, PASS),
        (4026532000, 4026532001, True, WARN),
    ],
)
def test_namespaces_of_a_container_warn_where_memory_is_to_be_shared(
    pid: int, ipc: int, one_host: bool, status: Severity, tmp_path: Path
) -> None:
    folder = tmp_path / "proc/self/ns"
    folder.mkdir(parents=True)
    (folder / "pid").symlink_to(f"pid:[{pid}]")
    (folder / "ipc").symlink_to(f"ipc:[{ipc}]")
    assert only("namespaces", around(tmp_path, one_host=one_host)).status is status
    # The kernel's own names are understood.
    assert only("namespaces", around()).status is PASS


UCXX, NIXL = TransportName.UCXX, TransportName.NIXL


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The transports' packages that seem to be installed; ucxx has a UCX without verbs."""
    packages = {"ucxx", "nixl_cu13"}
    monkeypatch.setattr(
        transport_facts, "find_spec", lambda name: name if name in packages else None
    )
    monkeypatch.setattr(transport_facts, "ucx_modules", lambda: frozenset({"cuda", "cma"}))
    monkeypatch.setattr(transport_facts, "locked_bytes_limit", lambda root: None)
    return packages


@pytest.mark.parametrize(
    ("has_device", "has_nixl", "options", "status"),
    [
        (False, True, {}, PASS),
        (False, True, {"rdma": True}, FAIL),
        (True, True, {"transport": "auto"}, PASS),
        (True, True, {"transport": "nixl", "rdma": True}, PASS),
        (True, False, {}, WARN),
        (True, False, {"rdma": True}, FAIL),
        (True, True, {"transport": "ucxx", "one_host": True}, PASS),
    ],
)
def test_a_network_that_lies_idle_warns_or_fails_where_it_is_meant(
    has_device: bool,
    has_nixl: bool,
    options: dict[str, Any],
    status: Severity,
    tmp_path: Path,
    installed: set[str],
) -> None:
    if has_device:
        add_rdma_device(tmp_path)
    if not has_nixl:
        installed.remove("nixl_cu13")
    assert only("rdma", around(tmp_path, **options)).status is status


def test_no_library_fails(tmp_path: Path, installed: set[str]) -> None:
    installed.clear()
    for check in ("transport", "ucx"):
        assert only(check, around(tmp_path)).status is FAIL


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("pool", "status"),
    [
        (frozenset(), PASS),
        (frozenset({UCXX}), PASS),
        (frozenset({NIXL}), FAIL),
        (frozenset({UCXX, NIXL}), WARN),
    ],
)
def test_the_transport_is_compared_with_the_pools(
    pool: frozenset[TransportName], status: Severity, tmp_path: Path
) -> None:
    choice = around(tmp_path, transport="ucxx").transport
    assert judge_transport(choice, pool).status is status


def test_gpudirect_is_looked_for_only_where_both_are_used(tmp_path: Path) -> None:
    assert findings("gpudirect", around(tmp_path, rdma=True)) == []
    assert findings("gpudirect", around(tmp_path, device="cuda:0")) == []


@pytest.mark.parametrize(
    ("path", "text", "status"),
    [
        ("sys/module/nvidia_peermem/version", "1", PASS),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06",
            PASS,
        ),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15",
            WARN,
        ),
        ("unrelated", "", WARN),
    ],
)
def test_one_of_two_ways_of_gpudirect_must_be_there(
    path: str, text: str, status: Severity, tmp_path: Path
) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    assert only("gpudirect", around(tmp_path, rdma=True, device="cuda:0")).status is status


@pytest.mark.parametrize(
    ("data_host", "one_host", "status"),
    [
        ("127.0.0.1", False, WARN),
        ("127.0.0.1", True, PASS),
        # For documentation (RFC 5737): no machine has it.
        ("203.0.113.9", False, FAIL),
    ],
)
def test_the_data_host_is_an_address_of_this_machine_that_others_reach(
    data_host: str, one_host: bool, status: Severity
) -> None:
    assert only("dns", around(data_host=data_host, one_host=one_host)).status is status


def test_a_slow_resolver_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 3.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    assert cluster_checks._resolve("localhost", "the control plane").status is WARN


@pytest.mark.parametrize(
    ("ahead_seconds", "status"), [(0.2, PASS), (-0.2, PASS), (5.0, WARN), (-300.0, FAIL)]
)
def test_the_clock_is_compared_with_the_control_planes(
    ahead_seconds: float, status: Severity
) -> None:
    assert judge_clock(ahead_seconds).status is status


@pytest.mark.parametrize(
    ("control_plane", "server", "status"),
    [
        (__version__, __version__, PASS),
        ("9.9.9", __version__, WARN),
        (__version__, "9.9.9", WARN),
    ],
)
def test_another_version_anywhere_warns_and_is_named(
    control_plane: str, server: str, status: Severity
) -> None:
    description = membership_pb2.ServerDescription(server_id="a", version=server)
    cluster = cluster_pb2.DescribeClusterResponse(
        version=control_plane, servers=[membership_pb2.ServerStatus(server=description)]
    )
    finding = compare_versions("own", cluster)
    assert finding.status is status
    assert ("9.9.9" in finding.says) == (status is WARN)


@pytest.mark.parametrize(
    ("lanes", "one_host", "floor", "status"),
    [
        ("tcp,posix", True, 0.0, PASS),
        ("tcp", True, 0.0, WARN),
        ("cuda_ipc", True, 0.0, PASS),
        ("tcp", False, 0.0, PASS),
        ("tcp", False, 5.0, FAIL),
    ],
)
def test_a_self_test_tells_a_slow_or_wrong_way(
    lanes: str, one_host: bool, floor: float, status: Severity
) -> None:
    result = ProbeResult(
        peer="p",
        transport="ucxx",
        lanes=lanes,
        nbytes=1,
        gigabytes_per_second=4.0,
        round_trip_seconds=1e-5,
    )
    finding = judge_self_test(result, one_host=one_host, floor=floor)
    assert finding.status is status
    assert finding.figures["lanes"] == lanes
