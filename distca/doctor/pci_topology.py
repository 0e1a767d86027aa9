"""Which NIC is nearest to which GPU, from the PCI tree that the kernel shows below /sys."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""Of a PCI function: domain, bus, device, function."""

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"
"""Of 3D and display controllers, the first byte of a PCI class."""


class Nearness(IntEnum):
    """What lies between two devices, from near to far."""

    SWITCH = 0
    ROOT = 1
    NUMA = 2
    SOCKETS = 3

    @property
    def words(self) -> str:
        return (
            "behind the same PCIe switch",
            "at the same root complex",
            "at the same NUMA node",
            "across sockets",
        )[self]


@dataclass(frozen=True, kw_only=True)
class PciDevice:
    """One PCI function.

    Attributes:
        name: how people call it: the address, or the name of an RDMA device.
        root: its host bridge, for example ``pci0000:00``.
        path: addresses from the root port down to itself.
        numa_node: -1 if the kernel does not know it.
    """

    name: str
    root: str
    path: tuple[str, ...]
    numa_node: int

    def nearness(self, other: PciDevice) -> Nearness:
        """What lies between this device and ``other``."""
        if self.root == other.root:
            # A root port leads to one device or to a switch.
            return Nearness.SWITCH if self.path[0] == other.path[0] else Nearness.ROOT
        if self.numa_node == other.numa_node and self.numa_node >= 0:
            return Nearness.NUMA
        return Nearness.SOCKETS


def gpus(root: Path = Path("/")) -> tuple[PciDevice, ...]:
    """NVIDIA's GPUs, by address.

    Args:
        root: of the file system; only tests have another than ``/``.
    """
    found = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        is_gpu = _text(folder / "vendor") == _NVIDIA
        if is_gpu and _text(folder / "class").startswith(_DISPLAY_CLASS):
            found.append(_device(folder.name, folder))
    return tuple(device for device in found if device is not None)


def nics(names: list[str], root: Path = Path("/")) -> tuple[PciDevice, ...]:
    """The RDMA devices ``names``; those that are no PCI devices are left out."""
    found = [_device(name, root / "sys/class/infiniband" / name / "device") for name in names]
    return tuple(device for device in found if device is not None)


def nearest(gpu: PciDevice, among: tuple[PciDevice, ...]) -> tuple[Nearness, tuple[str, ...]]:
    """How near the nearest of ``among``, of which there is one at least, are; and their names."""
    by_name = {device.name: gpu.nearness(device) for device in among}
    least = min(by_name.values())
    return least, tuple(name for name, near in by_name.items() if near is least)


def _device(name: str, folder: Path) -> PciDevice | None:
    if not folder.exists():
        return None
    parts = folder.resolve().parts
    path = tuple(part for part in parts if _ADDRESS.fullmatch(part))
    roots = [part for part in parts if part.startswith("pci") and ":" in part]
    if not path or not roots:
        return None
    node = _text(folder / "numa_node")
    return PciDevice(
        name=name, root=roots[0], path=path, numa_node=int(node) if node.isdigit() else -1
    )


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
