"""Which NIC serves which GPU, on the PCI trees of several machines, and how fast it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from data_plane.rdma import RdmaPort
from data_plane.transport import ProbeResult
from data_plane.transport_choice import TransportChoice
from data_plane.transport_facts import TransportFacts
from data_plane.transports import TransportName
from distca.doctor import nic_rates
from distca.doctor.finding import Finding, Status
from distca.doctor.machine_checks import check_nics
from distca.doctor.nic_rates import check_nic_rates
from distca.doctor.pci_topology import Nearness, gpus, nearest, nics
from distca.doctor.responder import ResponderSettings
from distca.doctor.settings import DoctorSettings
from distca.doctor.surroundings import Surroundings

SOCKET_0, SOCKET_1 = "pci0000:00", "pci0000:80"


def add(root: Path, path: str, numa_node: int, *, vendor: str, kind: str) -> Path:
    """Adds a PCI function at ``path`` below /sys/devices."""
    folder = root / "sys/devices" / path
    folder.mkdir(parents=True)
    for name, text in (("vendor", vendor), ("class", kind), ("numa_node", str(numa_node))):
        (folder / name).write_text(text + "\n")
    bus = root / "sys/bus/pci/devices"
    bus.mkdir(parents=True, exist_ok=True)
    (bus / folder.name).symlink_to(folder)
    return folder


def add_gpu(root: Path, path: str, numa_node: int = 0) -> None:
    add(root, path, numa_node, vendor="0x10de", kind="0x030200")


def add_nic(root: Path, name: str, path: str, numa_node: int = 0) -> None:
    folder = add(root, path, numa_node, vendor="0x15b3", kind="0x020700")
    port = folder / "infiniband" / name / "ports/1"
    port.mkdir(parents=True)
    for file, text in (("state", "4: ACTIVE"), ("link_layer", "InfiniBand"), ("rate", "400 Gb")):
        (port / file).write_text(text + "\n")
    (folder / "infiniband" / name / "device").symlink_to(folder)
    classes = root / "sys/class/infiniband"
    classes.mkdir(parents=True, exist_ok=True)
    (classes / name).symlink_to(folder / "infiniband" / name)


def between(root: Path) -> tuple[Nearness, tuple[str, ...]]:
    names = [folder.name for folder in sorted((root / "sys/class/infiniband").glob("*"))]
    (gpu,) = gpus(root)
    return nearest(gpu, nics(names, root))


GPU = f"{SOCKET_0}/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0"


@pytest.mark.parametrize(
    ("path", "numa_node", "near"),
    [
        (f"{SOCKET_0}/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0", 0, Nearness.SWITCH),
        (f"{SOCKET_0}/0000:00:02.0/0000:05:00.0", 0, Nearness.ROOT),
        ("pci0000:40/0000:40:01.0/0000:41:00.0", 0, Nearness.NUMA),
        (f"{SOCKET_1}/0000:80:01.0/0000:81:00.0", 1, Nearness.SOCKETS),
        ("pci0000:40/0000:40:01.0/0000:41:00.0", -1, Nearness.SOCKETS),
    ],
)
def test_what_lies_between(tmp_path: Path, path: str, numa_node: int, near: Nearness) -> None:
    add_gpu(tmp_path, GPU, 0)
    add_nic(tmp_path, "mlx5_0", path, numa_node)
    assert between(tmp_path) == (near, ("mlx5_0",))


def test_the_nearest_are_named_together(tmp_path: Path) -> None:
    add_gpu(tmp_path, GPU)
    switch = f"{SOCKET_0}/0000:00:01.0/0000:01:00.0"
    add_nic(tmp_path, "mlx5_0", f"{SOCKET_1}/0000:80:01.0/0000:81:00.0", 1)
    add_nic(tmp_path, "mlx5_1", f"{switch}/0000:02:01.0/0000:04:00.0")
    add_nic(tmp_path, "mlx5_2", f"{switch}/0000:02:01.0/0000:04:00.1")  # a virtual function
    assert between(tmp_path) == (Nearness.SWITCH, ("mlx5_1", "mlx5_2"))


def found(root: Path) -> list[tuple[Status, str]]:
    around = Surroundings(settings=DoctorSettings(device="cpu"), cluster=None, root=root)
    return [(finding.status, finding.says) for finding in check_nics(around)]


def test_each_gpu_has_a_line_and_one_across_sockets_is_a_warning(tmp_path: Path) -> None:
    add_gpu(tmp_path, GPU, 0)
    add_gpu(tmp_path, f"{SOCKET_1}/0000:80:01.0/0000:81:00.0", 1)
    add_nic(tmp_path, "mlx5_0", f"{SOCKET_0}/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0")
    assert found(tmp_path) == [
        (Status.PASS, "GPU 0000:03:00.0: mlx5_0, behind the same PCIe switch"),
        (Status.WARN, "GPU 0000:81:00.0: mlx5_0, across sockets"),
    ]


def test_without_gpu_or_nic_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert found(tmp_path) == []
    add_gpu(tmp_path, GPU)
    assert found(tmp_path) == []
    other = tmp_path / "other"
    add_nic(other, "mlx5_0", f"{SOCKET_0}/0000:00:02.0/0000:05:00.0")
    assert found(other) == []


def port_of(device: str, *, active: bool = True, opens: bool = True) -> RdmaPort:
    return RdmaPort(
        device=device,
        port="1",
        state="4: ACTIVE" if active else "1: DOWN",
        link_layer="InfiniBand",
        rate="400 Gb/sec (4X NDR)",
        driver="mlx5_core",
        opens=opens,
    )


def around_ports(
    root: Path, *ports: RdmaPort, name: TransportName = TransportName.NIXL, **settings: Any
) -> Surroundings:
    """A machine with RDMA devices, whose transport is chosen."""
    where = Surroundings(settings=DoctorSettings(**settings), root=root, environ={})
    # What the machine that runs the tests has does not count.
    vars(where).update(
        facts=TransportFacts(ports=ports), transport=TransportChoice(name=name, reason="asked for")
    )
    return where


Measured = list[tuple[ResponderSettings, Mapping[str, str]]]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """What was measured instead of being measured, at 40 GB/s."""
    seen: Measured = []

    def measure(
        peer: ResponderSettings, probe_seconds: float, ways: Mapping[str, str]
    ) -> ProbeResult:
        seen.append((peer, ways))
        return ProbeResult("peer", peer.transport, "rc", 2**23, 40.0, 2e-6)

    monkeypatch.setattr(nic_rates, "_measure_apart", measure)
    return seen


def test_each_gpu_is_measured_with_the_nics_nearest_to_it(
    tmp_path: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_gpu(tmp_path, GPU)
    add_gpu(tmp_path, f"{SOCKET_1}/0000:80:01.0/0000:81:00.0", 1)
    add_nic(tmp_path, "mlx5_0", f"{SOCKET_0}/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0")
    add_nic(tmp_path, "mlx5_1", f"{SOCKET_1}/0000:80:01.0/0000:82:00.0", 1)
    addresses = ["0000:03:00.0", "0000:81:00.0"]
    monkeypatch.setattr(nic_rates, "_pci_address", addresses.__getitem__)
    where = around_ports(
        tmp_path,
        port_of("mlx5_0"),
        port_of("mlx5_1"),
        device="cuda:0",
        also_devices=("cuda:1",),
        data_host="127.0.0.1",
        min_gigabytes_per_second=40.0,
    )
    says = [(finding.status, finding.says) for finding in check_nic_rates(where)]
    assert says == [
        (
            Status.PASS,
            f"{nic}:1 (InfiniBand, 400 Gb/sec (4X NDR)), {gpu}: 40 GB/s over rc, round trip 2 us",
        )
        for nic, gpu in (("mlx5_0", "cuda:0"), ("mlx5_1", "cuda:1"))
    ]
    assert [(peer.device, peer.transport, peer.one_host) for peer, _ in measured] == [
        ("cuda:0", "nixl", False),
        ("cuda:1", "nixl", False),
    ]
    assert [ways for _, ways in measured] == [
        {"UCX_NET_DEVICES": f"{nic}:1", "UCX_TLS": "rc,cuda_copy"} for nic in ("mlx5_0", "mlx5_1")
    ]


def test_the_hosts_memory_is_measured_with_all_nics_that_can_be_used(
    tmp_path: Path, measured: Measured
) -> None:
    ports = port_of("mlx5_0"), port_of("mlx5_1", active=False), port_of("mlx5_2", opens=False)
    where = around_ports(tmp_path, *ports, data_host="127.0.0.1", min_gigabytes_per_second=50.0)
    (finding,) = check_nic_rates(where)
    assert finding.status is Status.FAIL
    assert "mlx5_0:1" in finding.says
    assert "asked for are 50" in finding.says
    assert [ways for _, ways in measured] == [{"UCX_NET_DEVICES": "mlx5_0:1", "UCX_TLS": "rc"}]


def test_nothing_is_measured_by_a_transport_without_rdma(
    tmp_path: Path, measured: Measured
) -> None:
    where = around_ports(tmp_path, port_of("mlx5_0"), name=TransportName.UCXX)
    assert not list(check_nic_rates(where)), "check rdma says what is wrong"
    assert not measured


def without_rdma(**settings: Any) -> Finding:
    (finding,) = check_nic_rates(
        around_ports(Path("/"), name=TransportName.UCXX, data_host="127.0.0.1", **settings)
    )
    return finding


@pytest.mark.timeout(180)
def test_without_an_rdma_device_that_is_said_and_tcp_is_measured() -> None:
    finding = without_rdma()
    assert finding.status is Status.PASS
    assert finding.says.startswith("no RDMA device; lo by TCP, cpu: ")
    assert " GB/s over tcp, round trip " in finding.says
    assert finding.figures["lanes"] == "tcp"


@pytest.mark.timeout(180)
def test_a_measurement_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nic_rates, "_ways", lambda *_, **__: {"UCX_NET_DEVICES": "none0"})
    finding = without_rdma()
    assert finding.status is Status.FAIL
    assert finding.says.startswith("no RDMA device; lo by TCP, cpu: ")
    assert len(finding.says.splitlines()) == 1
    assert "rror" in finding.says
