"""Limits, shared memory, namespaces and RDMA devices of the machine or container."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from data_plane.transports import TransportName
from distca.doctor.finding import Finding, failed, passed, warned
from distca.doctor.surroundings import Surroundings
from distca.doctor.ucx_library import ucx_modules

_MIN_SHM_BYTES = 2**30
_MIN_LOCKED_BYTES = 16 * 2**30
_UNLIMITED_BYTES = 2**62
"""Some systems write "unlimited" as a huge number."""

_INITIAL_NAMESPACES = {"pid": "pid:[4026531836]", "ipc": "ipc:[4026531839]"}
"""The machine's own: numbers that the kernel fixes (include/linux/proc_ns.h)."""


def check_memlock(around: Surroundings) -> Iterable[Finding]:
    """May memory be locked, as RDMA needs?"""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY or soft >= _UNLIMITED_BYTES
    shown = "unlimited" if unlimited else _size(soft)
    if around.settings.rdma and not unlimited and soft < _MIN_LOCKED_BYTES:
        yield failed(
            "memlock",
            f"only {shown} may be locked; RDMA locks all of its buffers",
            "ulimit -l unlimited; in Docker --ulimit memlock=-1; in a pod capability IPC_LOCK, or "
            "LimitMEMLOCK=infinity for the container runtime",
            limit_bytes=soft,
        )
        return
    needed = "" if around.settings.rdma or unlimited else "; only RDMA needs more"
    yield passed("memlock", shown + needed, limit_bytes=-1 if unlimited else soft)


def check_shared_memory(around: Surroundings) -> Iterable[Finding]:
    """Is /dev/shm there, and large enough?"""
    folder = around.root / "dev/shm"
    try:
        stat = os.statvfs(folder)
    except OSError as error:
        yield failed("shared-memory", f"/dev/shm: {error.strerror}", "mount a tmpfs on /dev/shm")
        return
    if not os.access(folder, os.W_OK):
        yield failed("shared-memory", "/dev/shm cannot be written", "mount it writable")
        return
    size_bytes, free_bytes = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    yield judge_shared_memory(size_bytes, free_bytes, one_host=around.settings.one_host)


def judge_shared_memory(size_bytes: int, free_bytes: int, *, one_host: bool) -> Finding:
    """Whether ``free_bytes`` of ``size_bytes`` are enough."""
    says = f"/dev/shm has {_size(size_bytes)}, {_size(free_bytes)} of them free"
    if free_bytes >= _MIN_SHM_BYTES:
        return passed("shared-memory", says, size_bytes=size_bytes, free_bytes=free_bytes)
    found = failed if one_host else warned
    return found(
        "shared-memory",
        f"{says}; servers and trainers of one machine want {_size(_MIN_SHM_BYTES)}",
        "in Docker --shm-size=1g; in a pod a memory-backed emptyDir (chart: sharedMemorySize)",
        size_bytes=size_bytes,
        free_bytes=free_bytes,
    )


def check_namespaces(around: Surroundings) -> Iterable[Finding]:
    """Whose shared memory and GPU memory can be mapped?"""
    own = []
    for name, initial in _INITIAL_NAMESPACES.items():
        link = around.root / "proc/self/ns" / name
        if os.readlink(link) != initial:
            own.append(name.upper())
    if not own:
        yield passed("namespaces", "PID and IPC namespaces are the machine's")
        return
    says = f"{' and '.join(own)} namespace of a container"
    if around.settings.one_host:
        yield warned(
            "namespaces",
            f"{says}: shared memory and cuda_ipc reach processes of this container or pod alone",
            "run trainers and servers in one pod, or share the machine's: hostIPC and hostPID in a "
            "pod, --ipc=host --pid=host in Docker",
        )
        return
    yield passed("namespaces", f"{says}; other machines are reached over the network")


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA device, as the kernel shows it."""

    device: str
    port: str
    state: str
    link_layer: str
    rate: str

    @property
    def active(self) -> bool:
        return "ACTIVE" in self.state

    def __str__(self) -> str:
        return f"{self.device}:{self.port} ({self.link_layer}, {self.rate})"


def rdma_ports(root: Path) -> list[RdmaPort]:
    """All ports of all RDMA devices that this process sees."""
    ports = []
    for folder in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        text = {
            name: (folder / name).read_text().strip() if (folder / name).exists() else "unknown"
            for name in ("state", "link_layer", "rate")
        }
        ports.append(RdmaPort(folder.parent.parent.name, folder.name, **text))
    return ports


def check_rdma(around: Surroundings) -> Iterable[Finding]:
    """Is there an RDMA network, and can UCX use it?"""
    ports = rdma_ports(around.root)
    active = [port for port in ports if port.active]
    shown = ", ".join(str(port) for port in active)
    if not around.settings.rdma:
        if active:
            yield warned(
                "rdma",
                f"{shown} would carry the data, and --rdma is not given: TCP does",
                "turn rdma on (chart: rdma.enabled), or leave out this check if TCP is meant",
            )
        else:
            yield passed("rdma", "no active device; the data goes over TCP")
        return
    if not active:
        yield _no_rdma(ports)
        return
    verbs = sorted((around.root / "dev/infiniband").glob("uverbs*"))
    if not any(os.access(path, os.R_OK | os.W_OK) for path in verbs):
        yield failed(
            "rdma",
            f"{shown}, but no /dev/infiniband/uverbs* can be opened",
            "request the device plugin's resource instead of mounting /dev/infiniband",
        )
        return
    if around.settings.transport == TransportName.NIXL:
        # Its wheel carries a UCX with verbs.
        yield passed("rdma", shown)
        return
    yield judge_ucx_modules(shown, ucx_modules())


def _no_rdma(ports: list[RdmaPort]) -> Finding:
    if ports:
        states = ", ".join(f"{port.device}:{port.port} is {port.state}" for port in ports)
        return failed("rdma", f"no port is active: {states}", "check cable and subnet manager")
    return failed(
        "rdma",
        "there is no RDMA device",
        "load the driver; in a pod request the device plugin's resource (chart: rdma.resourceName)",
    )


def judge_ucx_modules(ports: str, modules: frozenset[str] | None) -> Finding:
    """Whether the UCX that ucxx loads knows verbs; ``modules`` is None if there is no ucxx."""
    if modules is not None and "ib" not in modules:
        return failed(
            "rdma",
            f"{ports}, but this UCX has no verbs (transports of the ucxx wheel: "
            f"{', '.join(sorted(modules)) or 'none'})",
            "give --transport=nixl, whose wheel has them, or install a UCX built with verbs and "
            "set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true",
        )
    return passed("rdma", ports)


def check_gpudirect(around: Surroundings) -> Iterable[Finding]:
    """Can network devices read GPU memory?"""
    if not (around.settings.rdma and around.settings.on_gpu):
        return
    if (around.root / "sys/module/nvidia_peermem").exists():
        yield passed("gpudirect", "nvidia_peermem is loaded")
        return
    version = around.root / "proc/driver/nvidia/version"
    if version.exists() and "Open Kernel Module" in version.read_text():
        yield passed("gpudirect", "dma-buf, by the open kernel module of the driver")
        return
    yield warned(
        "gpudirect",
        "neither nvidia_peermem nor the driver's open kernel module: data goes through the host",
        "modprobe nvidia_peermem on the machine",
    )


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"


MACHINE_CHECKS: dict[str, Callable[[Surroundings], Iterable[Finding]]] = {
    "memlock": check_memlock,
    "shared-memory": check_shared_memory,
    "namespaces": check_namespaces,
    "rdma": check_rdma,
    "gpudirect": check_gpudirect,
}
