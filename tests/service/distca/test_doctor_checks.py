"""Each check of ``distca doctor``: what makes it pass, and what makes it warn or fail."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core_attention.kernels.cpu import CpuKernel
from core_attention.shape import AttentionShape
from data_plane import transport_facts
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


def statuses(check: str, where: Surroundings) -> list[Severity]:
    return [finding.status for finding in findings(check, where)]


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


class TestGpu:
    def test_none_asked_for_passes(self) -> None:
        assert only("gpu", around()).status is PASS

    def test_pytorch_without_cuda_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", None)
        finding = only("gpu", around(device="cuda:0"))
        assert finding.status is FAIL
        assert "has no CUDA" in finding.says

    @pytest.mark.parametrize(("driver", "words"), [(True, "nvidia-smi"), (False, "--gpus")])
    def test_no_gpu_fails_and_tells_a_missing_device_from_a_broken_driver(
        self, driver: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        if driver:
            (tmp_path / "dev").mkdir()
            (tmp_path / "dev/nvidiactl").touch()
        finding = only("gpu", around(tmp_path, device="cuda:0"))
        assert finding.status is FAIL
        assert words in finding.advice

    @pytest.mark.parametrize(
        ("device", "free_share", "status", "words"),
        [
            ("cuda:1", 1.0, PASS, "NVIDIA H200, 140 GiB, compute capability 9.0"),
            ("cuda:1", 0.5, WARN, "only 70 GiB are free"),
            ("cuda:2", 1.0, FAIL, "the number of GPUs is 2"),
        ],
    )
    def test_the_gpu_must_exist_and_should_be_free(
        self,
        device: str,
        free_share: float,
        status: Severity,
        words: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        @dataclasses.dataclass
        class Properties:
            name: str = "NVIDIA H200"
            major: int = 9
            minor: int = 0

        total = 140 * 2**30
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda index: (int(free_share * total), total)
        )
        finding = only("gpu", around(device=device))
        assert finding.status is status
        assert words in finding.says

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_a_real_gpu_passes_every_check_of_the_device(self) -> None:
        where = around(device="cuda:0", shapes=(dataclasses.replace(NODE_SHAPE, dtype="bfloat16"),))
        assert FAIL not in statuses("kernels", where), findings("kernels", where)
        assert only("gpu", where).status is not FAIL


class TestKernels:
    def test_a_shape_that_runs_passes(self) -> None:
        finding = only("kernels", around(shapes=(NODE_SHAPE,)))
        assert (finding.status, finding.says) == (PASS, "cpu runs 4:2:16:float32")

    def test_a_shape_that_the_kernel_does_not_take_fails(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(kernel: CpuKernel, shape: AttentionShape, mask: object) -> None:
            raise ValueError(f"head_dim is {shape.head_dim}; valid are 64 and 128")

        monkeypatch.setattr(CpuKernel, "check", refuse)
        finding = only("kernels", around(shapes=(NODE_SHAPE,)))
        assert finding.status is FAIL
        assert finding.says == "head_dim is 16; valid are 64 and 128"

    @pytest.mark.parametrize("shapes", [(), (NODE_SHAPE,)])
    def test_what_a_server_launches_before_it_serves_is_launched(
        self, shapes: tuple[AttentionShape, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A kernel that can be chosen, takes the shape and cannot run: the node would not start."""

        def rehearse(kernel: CpuKernel, shape: AttentionShape, device: torch.device) -> None:
            raise RuntimeError("no kernel image is available for execution on the device")

        monkeypatch.setattr(device_checks, "rehearse", rehearse)
        finding = only("kernels", around(shapes=shapes))
        assert finding.status is FAIL
        shape = "4:2:16:float32" if shapes else "32:8:128:bfloat16"
        assert finding.says == (
            f"cpu with {shape} fails on cpu: RuntimeError: no kernel image is available for "
            "execution on the device"
        )

    def test_a_device_that_hangs_fails_in_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        released = threading.Event()
        monkeypatch.setattr(device_checks, "rehearse", lambda *_: released.wait(60))
        try:
            trouble = rehearsal_trouble(CpuKernel(), NODE_SHAPE, torch.device("cpu"), seconds=0.2)
        finally:
            released.set()
        assert trouble is not None
        assert trouble.cause == "cpu with 4:2:16:float32 does not end within 0.2 s on cpu"

    @pytest.mark.parametrize(("device", "count"), [("cuda:0", 0), ("cuda:2", 2)])
    def test_no_such_gpu_fails(
        self, device: str, count: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        finding = only("kernels", around(device=device))
        assert (finding.status, finding.says) == (FAIL, f"no {device} to run on")

    @pytest.mark.parametrize(
        ("name", "capability", "status"),
        [("fa2", (9, 0), WARN), ("fa4", (9, 0), PASS), ("fa2", (8, 0), PASS), ("cpu", None, PASS)],
    )
    def test_a_slower_kernel_than_there_is_warns(
        self, name: str, capability: tuple[int, int] | None, status: Severity
    ) -> None:
        assert judge_kernel(name, capability, "").status is status


class TestSharedMemory:
    def test_none_fails(self, tmp_path: Path) -> None:
        assert only("shared-memory", around(tmp_path)).status is FAIL

    def test_that_of_this_machine_is_measured(self) -> None:
        finding = only("shared-memory", around())
        stat = os.statvfs("/dev/shm")
        assert finding.figures["size_bytes"] == stat.f_blocks * stat.f_frsize

    @pytest.mark.parametrize(
        ("free_bytes", "one_host", "status"),
        [(64 * 2**20, False, WARN), (64 * 2**20, True, FAIL), (2**30, True, PASS)],
    )
    def test_docker_s_default_is_too_small(
        self, free_bytes: int, one_host: bool, status: Severity
    ) -> None:
        finding = judge_shared_memory(2**31, free_bytes, one_host=one_host)
        assert finding.status is status


class TestNamespaces:
    @staticmethod
    def root(tmp_path: Path, pid: int, ipc: int) -> Path:
        folder = tmp_path / "proc/self/ns"
        folder.mkdir(parents=True)
        (folder / "pid").symlink_to(f"pid:[{pid}]")
        (folder / "ipc").symlink_to(f"ipc:[{ipc}]")
        return tmp_path

    def test_those_of_the_machine_pass(self, tmp_path: Path) -> None:
        finding = only("namespaces", around(self.root(tmp_path, 4026531836, 4026531839)))
        assert finding.says == "PID and IPC namespaces are the machine's"

    def test_those_of_a_container_warn_where_memory_is_to_be_shared(self, tmp_path: Path) -> None:
        root = self.root(tmp_path, 4026532000, 4026532001)
        assert only("namespaces", around(root)).status is PASS
        finding = only("namespaces", around(root, one_host=True))
        assert finding.status is WARN
        assert finding.says.startswith("PID and IPC namespace of a container")

    def test_the_kernels_own_names_are_understood(self) -> None:
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


@pytest.mark.usefixtures("installed")
class TestRdma:
    def test_none_passes_where_tcp_is_meant_and_fails_where_it_is_not(self, tmp_path: Path) -> None:
        assert only("rdma", around(tmp_path)).status is PASS
        finding = only("rdma", around(tmp_path, rdma=True))
        assert (finding.status, finding.says) == (FAIL, "there is no RDMA device")
        assert "rdma.resourceName" in finding.advice

    @pytest.mark.parametrize("rdma", [False, True])
    @pytest.mark.parametrize("transport", ["auto", "nixl"])
    def test_a_network_that_is_used_passes(
        self, transport: str, rdma: bool, tmp_path: Path
    ) -> None:
        where = around(add_rdma_device(tmp_path), transport=transport, rdma=rdma)
        finding = only("rdma", where)
        assert finding.status is PASS
        assert finding.says == "mlx5_0:1 (InfiniBand, 400 Gb/sec (4X NDR)), by nixl"

    @pytest.mark.parametrize(("rdma", "status"), [(False, WARN), (True, FAIL)])
    def test_a_network_that_lies_idle_warns_or_fails_where_it_is_meant(
        self, rdma: bool, status: Severity, tmp_path: Path, installed: set[str]
    ) -> None:
        installed.remove("nixl_cu13")
        finding = only("rdma", around(add_rdma_device(tmp_path), rdma=rdma))
        assert finding.status is status
        assert "mlx5_0:1 (InfiniBand, 400 Gb/sec (4X NDR))" in finding.says
        assert "nixl is not installed and the UCX of ucxx has no verbs" in finding.says
        assert "distca[nixl-cu13]" in finding.advice

    def test_a_network_that_is_not_meant_for_one_machine_passes(self, tmp_path: Path) -> None:
        where = around(add_rdma_device(tmp_path), one_host=True, transport="ucxx")
        assert only("rdma", where).status is PASS


@pytest.mark.usefixtures("installed")
class TestTransport:
    def test_what_auto_picks_and_why(self, tmp_path: Path) -> None:
        finding = only("transport", around(tmp_path))
        assert finding.status is PASS
        assert finding.says.startswith("ucxx: there is no RDMA device")
        finding = only("transport", around(add_rdma_device(tmp_path)))
        assert finding.says == "nixl: it can use mlx5_0:1 (InfiniBand, 400 Gb/sec (4X NDR))"

    def test_no_library_fails(self, tmp_path: Path, installed: set[str]) -> None:
        installed.clear()
        where = around(tmp_path)
        finding = only("transport", where)
        assert (finding.status, "nixl-cu13" in finding.says) == (FAIL, True)
        assert only("ucx", where).status is FAIL

    @pytest.mark.parametrize(
        ("pool", "status", "words"),
        [
            (frozenset(), PASS, "given by name"),
            (frozenset({UCXX}), PASS, "given by name"),
            (frozenset({NIXL}), FAIL, "the servers of the pool use nixl"),
            (frozenset({UCXX, NIXL}), WARN, "the servers of the pool use nixl and ucxx"),
        ],
    )
    def test_it_is_compared_with_the_pools(
        self, pool: frozenset[TransportName], status: Severity, words: str, tmp_path: Path
    ) -> None:
        finding = judge_transport(around(tmp_path, transport="ucxx").transport, pool)
        assert finding.status is status
        assert words in finding.says


class TestGpuDirect:
    def test_it_is_looked_for_only_where_both_are_used(self, tmp_path: Path) -> None:
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
    def test_one_of_two_ways_must_be_there(
        self, path: str, text: str, status: Severity, tmp_path: Path
    ) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        assert only("gpudirect", around(tmp_path, rdma=True, device="cuda:0")).status is status


class TestDataHost:
    def test_loopback_warns_unless_all_is_on_one_machine(self) -> None:
        assert only("dns", around(data_host="127.0.0.1")).status is WARN
        assert only("dns", around(data_host="127.0.0.1", one_host=True)).status is PASS

    def test_another_machines_address_fails(self) -> None:
        """203.0.113.0/24 is for documentation (RFC 5737): no machine has it."""
        finding = only("dns", around(data_host="203.0.113.9"))
        assert finding.status is FAIL
        assert "no IPv4 address of this machine" in finding.says

    def test_a_slow_resolver_warns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ticks = iter([0.0, 3.0])
        monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
        finding = cluster_checks._resolve("localhost", "the control plane")
        assert finding.status is WARN
        assert "took 3.0 s" in finding.says


@pytest.mark.parametrize(
    ("ahead_seconds", "status", "words"),
    [
        (0.2, PASS, "0.2 s ahead of"),
        (-0.2, PASS, "0.2 s behind"),
        (5.0, WARN, "5 s ahead of"),
        (-300.0, FAIL, "300 s behind"),
    ],
)
def test_the_clock_is_compared_with_the_control_planes(
    ahead_seconds: float, status: Severity, words: str
) -> None:
    finding = judge_clock(ahead_seconds)
    assert finding.status is status
    assert words in finding.says


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
