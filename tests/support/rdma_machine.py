"""RDMA devices as the kernel shows them below /sys and /dev, in a folder of a test."""

from __future__ import annotations

from pathlib import Path


def add_rdma_device(
    root: Path,
    device: str = "mlx5_0",
    *,
    driver: str = "mlx5_core",
    link_layer: str = "InfiniBand",
    states: tuple[str, ...] = ("4: ACTIVE",),
    rate: str = "400 Gb/sec (4X NDR)",
    verbs: bool = True,
) -> Path:
    """Adds a device, laid out as Linux 6.8 does it.

    Args:
        root: stands for ``/``.
        device: its name.
        driver: of the PCI device behind it; empty for a software device, which has none.
        link_layer: of its ports.
        states: of its ports, from port 1 on.
        rate: of its ports.
        verbs: its file below /dev/infiniband is in this container.

    Returns:
        ``root``.
    """
    classes = root / "sys/class"
    index = len(list(classes.glob("infiniband/*")))
    parent = root / f"sys/devices/{'pci0000:00' if driver else 'virtual'}/{index:04x}"
    folder = parent / "infiniband" / device
    for number, state in enumerate(states, start=1):
        port = folder / "ports" / str(number)
        port.mkdir(parents=True)
        for name, text in (("state", state), ("link_layer", link_layer), ("rate", rate)):
            (port / name).write_text(text + "\n")
    _link(classes / "infiniband" / device, folder)
    if driver:
        module = root / "sys/bus/pci/drivers" / driver
        module.mkdir(parents=True, exist_ok=True)
        _link(parent / "driver", module)
        _link(folder / "device", parent)
    file = parent / "infiniband_verbs" / f"uverbs{index}"
    file.mkdir(parents=True)
    (file / "ibdev").write_text(device + "\n")
    _link(classes / "infiniband_verbs" / file.name, file)
    if verbs:
        (root / "dev/infiniband").mkdir(parents=True, exist_ok=True)
        (root / "dev/infiniband" / file.name).touch()
    return root


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
