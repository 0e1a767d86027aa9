"""RDMA devices of this machine and the limits on their use, as the kernel shows them."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MIN_LOCKED_BYTES: Final = 16 * 2**30
"""RDMA locks every buffer that it uses."""

_UNLIMITED_BYTES = 2**62
"""Some systems write "unlimited" as a huge number."""

_CAP_IPC_LOCK = 14
"""Bit of the capability to lock memory without limit (include/uapi/linux/capability.h)."""


@dataclass(frozen=True, kw_only=True)
class RdmaPort:
    """A port of an RDMA device.

    Attributes:
        device: its name, for example ``"mlx5_0"``; udev may have given it another one.
        port: its number, from 1.
        state: as the kernel words it, for example ``"4: ACTIVE"``.
        link_layer: ``"InfiniBand"``, or ``"Ethernet"`` for RoCE.
        rate: for example ``"400 Gb/sec (4X NDR)"``.
        driver: of the device behind it, for example ``"mlx5_core"`` or ``"efa"``; empty for
            software devices such as Soft-RoCE.
        opens: this process can open the device's file below /dev/infiniband.
    """

    device: str
    port: str
    state: str
    link_layer: str
    rate: str
    driver: str
    opens: bool

    @property
    def active(self) -> bool:
        return "ACTIVE" in self.state

    def driver_is(self, family: str) -> bool:
        """Returns whether it is of a family of devices, for example ``"mlx5"``, NVIDIA's."""
        return (self.driver or self.device).startswith(family)

    @property
    def name(self) -> str:
        """As UCX_NET_DEVICES names it."""
        return f"{self.device}:{self.port}"

    def __str__(self) -> str:
        return f"{self.name} ({self.link_layer}, {self.rate})"


def rdma_ports(root: Path = Path("/")) -> tuple[RdmaPort, ...]:
    """All ports of all RDMA devices that this process sees.

    Args:
        root: of the file system.
    """
    ports = []
    for device in sorted(root.glob("sys/class/infiniband/*")):
        driver = device / "device" / "driver"
        opens = _opens(device.name, root)
        for folder in sorted(device.glob("ports/*")):
            ports.append(
                RdmaPort(
                    device=device.name,
                    port=folder.name,
                    state=_text(folder / "state"),
                    link_layer=_text(folder / "link_layer"),
                    rate=_text(folder / "rate"),
                    driver=driver.resolve().name if driver.exists() else "",
                    opens=opens,
                )
            )
    return tuple(ports)


def usable_rdma_devices(root: Path = Path("/")) -> tuple[str, ...]:
    """The active ports of devices that open, as UCX_NET_DEVICES names them.

    Args:
        root: of the file system.
    """
    return tuple(port.name for port in rdma_ports(root) if port.active and port.opens)


def locked_bytes_limit(root: Path = Path("/")) -> int | None:
    """Bytes that this process may lock; None without a limit.

    Args:
        root: of the file system.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= _UNLIMITED_BYTES or _may_lock_anything(root):
        return None
    return soft


def _may_lock_anything(root: Path) -> bool:
    """Returns whether the capability IPC_LOCK is in force: one that a pod adds is so for root
    alone."""
    try:
        status = (root / "proc/self/status").read_text()
    except OSError:
        return False
    effective = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return any(int(bits, 16) >> _CAP_IPC_LOCK & 1 for bits in effective)


def _opens(device: str, root: Path) -> bool:
    """Returns whether one of the device's files opens; the container's rules may forbid what its
    permissions allow."""
    for verbs in root.glob("sys/class/infiniband_verbs/uverbs*"):
        if _text(verbs / "ibdev") != device:
            continue
        try:
            os.close(os.open(root / "dev/infiniband" / verbs.name, os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            continue
        return True
    return False


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return "unknown"
