"""Shared memory, namespaces and RDMA devices of the machine or container."""

from __future__ import annotations

import os
from collections.abc import Iterable

from data_plane.transport_choice import TransportChoice, obstacles
from data_plane.transport_facts import TransportFacts
from distca.apps.doctor.finding import CheckFinding, failed, passed, warned
from distca.apps.doctor.settings import DoctorSettings
from distca.apps.doctor.surroundings import Surroundings
from distca.process.amounts import size_text

_MIN_SHM_BYTES = 2**30

_INITIAL_NAMESPACES = {"pid": "pid:[4026531836]", "ipc": "ipc:[4026531839]"}
"""The machine's own: numbers that the kernel fixes (include/linux/proc_ns.h)."""


def check_shared_memory(around: Surroundings) -> Iterable[CheckFinding]:
    """Is /dev/shm there, and large enough?"""
    folder = around.root / "dev/shm"
    try:
        stat = os.statvfs(folder)
    except OSError as error:
        yield failed(f"/dev/shm: {error.strerror}", "mount a tmpfs on /dev/shm")
        return
    if not os.access(folder, os.W_OK):
        yield failed("/dev/shm cannot be written", "mount it writable")
        return
    size_bytes, free_bytes = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    yield judge_shared_memory(size_bytes, free_bytes, one_host=around.settings.one_host)


def judge_shared_memory(size_bytes: int, free_bytes: int, *, one_host: bool) -> CheckFinding:
    """Judges whether ``free_bytes`` of ``size_bytes`` are enough."""
    says = f"/dev/shm has {size_text(size_bytes)}, {size_text(free_bytes)} of them free"
    if free_bytes >= _MIN_SHM_BYTES:
        return passed(says, size_bytes=size_bytes, free_bytes=free_bytes)
    found = failed if one_host else warned
    return found(
        f"{says}; servers and trainers of one machine want {size_text(_MIN_SHM_BYTES)}",
        "in Docker --shm-size=1g; in a pod a memory-backed emptyDir (chart: sharedMemorySize)",
        size_bytes=size_bytes,
        free_bytes=free_bytes,
    )


def check_namespaces(around: Surroundings) -> Iterable[CheckFinding]:
    """Whose shared memory and GPU memory can be mapped?"""
    own = []
    for name, initial in _INITIAL_NAMESPACES.items():
        link = around.root / "proc/self/ns" / name
        if os.readlink(link) != initial:
            own.append(name.upper())
    if not own:
        yield passed("PID and IPC namespaces are the machine's")
        return
    says = f"{' and '.join(own)} namespace of a container"
    if around.settings.one_host:
        yield warned(
            f"{says}: shared memory and cuda_ipc reach processes of this container or pod alone",
            "run trainers and servers in one pod, or share the machine's: hostIPC and hostPID in a "
            "pod, --ipc=host --pid=host in Docker",
        )
        return
    yield passed(f"{says}; other machines are reached over the network")


def check_rdma(around: Surroundings) -> Iterable[CheckFinding]:
    """Is there an RDMA network, and can the transport use it?"""
    try:
        choice = around.transport
    except ImportError as error:
        yield failed(str(error), "install it first")
        return
    yield judge_rdma(around.facts, choice, around.settings)


def judge_rdma(
    facts: TransportFacts, choice: TransportChoice, settings: DoctorSettings
) -> CheckFinding:
    """Judges whether ``choice`` uses the network that is meant."""
    shown = ", ".join(str(port) for port in facts.active_ports)
    found = choice.obstacles or obstacles(facts, choice.name)
    says = "; ".join(obstacle.says for obstacle in found)
    advice = "; ".join(obstacle.advice for obstacle in found)
    if choice.rdma or (settings.rdma and not found):
        return passed(f"{shown}, by {choice.name}")
    if settings.rdma:
        return failed(f"{shown}, but {says}" if shown else says, advice)
    if not facts.ports:
        return passed("there is no device; the data goes over TCP")
    if settings.one_host:
        return passed(f"{shown or 'no active port'}; all is on this machine")
    return warned(
        f"{shown or 'a device'} lies idle, and TCP carries the data: {says}",
        f"{advice}; or leave out this check if TCP is meant",
    )


def check_gpudirect(around: Surroundings) -> Iterable[CheckFinding]:
    """Can network devices read GPU memory?"""
    if not (around.settings.rdma and around.settings.on_gpu):
        return
    if (around.root / "sys/module/nvidia_peermem").exists():
        yield passed("nvidia_peermem is loaded")
        return
    version = around.root / "proc/driver/nvidia/version"
    if version.exists() and "Open Kernel Module" in version.read_text():
        yield passed("dma-buf, by the open kernel module of the driver")
        return
    yield warned(
        "neither nvidia_peermem nor the driver's open kernel module: data goes through the host",
        "modprobe nvidia_peermem on the machine",
    )
