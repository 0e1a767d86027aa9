"""Which NIC serves which GPU, on the PCI trees of several machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from distca.doctor.finding import Status
from distca.doctor.machine_checks import check_nics
from distca.doctor.pci_topology import Nearness, gpus, nearest, nics
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
