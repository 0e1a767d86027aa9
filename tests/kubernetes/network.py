"""A network of the tests' own: one namespace for the machines, one for each pod, a bridge between
them. All of it goes with the processes that are in it."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MACHINE_ADDRESS = "10.244.0.1"
"""Of the machines, which share one network; the API server listens there as well."""

SERVICE_NETWORK = "10.96.0.0/16"
KUBERNETES_ADDRESS = "10.96.0.1"
"""The first address of the Services' network, by which pods find the API server."""

_CLONE_NEWNET = 0x40000000
_BRIDGE = "pods"
_BRIDGE_MAC = "02:00:0a:f4:00:01"
"""Of the bridge itself: otherwise it takes the lowest of its ports', which changes as pods come and
go, and pods that know the old one reach no Service for seconds."""

_NAMESPACES = ("net", "ipc", "uts", "mount")
_START_SECONDS = 10.0

_libc = ctypes.CDLL(None, use_errno=True)


def run(*command: str) -> None:
    """A command of the network that must succeed.

    Raises:
        RuntimeError: with what it wrote.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}: {done.stderr}")


def _check(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}; it takes root")


@contextmanager
def own_network() -> Iterator[None]:
    """Moves this thread, with the threads and processes that it starts, into a network of its own.

    Raises:
        OSError: this process may not do that.
    """
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _check(_libc.unshare(_CLONE_NEWNET), "a network namespace")
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", _BRIDGE, "address", _BRIDGE_MAC, "type", "bridge")
        run("ip", "address", "add", f"{MACHINE_ADDRESS}/16", "dev", _BRIDGE)
        run("ip", "link", "set", _BRIDGE, "up")
        yield
    finally:
        _check(_libc.setns(before, _CLONE_NEWNET), "back to the network from before")
        os.close(before)


def add_address(address: str) -> None:
    """Gives the machines the address of a Service."""
    run("ip", "address", "replace", f"{address}/32", "dev", _BRIDGE)


def remove_address(address: str) -> None:
    """Takes it away."""
    run("ip", "address", "del", f"{address}/32", "dev", _BRIDGE)


_numbers = itertools.count(2)


@dataclass
class PodNetwork:
    """Network, host name and IPC of one pod, which its containers enter.

    Attributes:
        address: of the pod.
    """

    address: str
    _holder: subprocess.Popen[bytes]

    @classmethod
    def make(cls, hostname: str) -> PodNetwork:
        number = next(_numbers)
        address = f"10.244.{number >> 8}.{number & 255}"
        # In /sys it finds its own network devices.
        script = f"hostname {hostname}; mount -t sysfs sysfs /sys; exec sleep infinity"
        spaces = [f"--{each}" for each in _NAMESPACES]
        holder = subprocess.Popen(["unshare", *spaces, "sh", "-c", script])
        network = cls(address, holder)
        deadline = time.monotonic() + _START_SECONDS
        while _comm(holder.pid) != "sleep":
            if time.monotonic() > deadline:
                raise RuntimeError(f"the namespaces of pod {hostname} are not there")
            time.sleep(0.01)
        pair, there = f"pod{number}", [*network.enter(), "ip"]
        run("ip", "link", "add", pair, "type", "veth", "peer", "eth0", "netns", str(holder.pid))
        run("ip", "link", "set", pair, "master", _BRIDGE, "up")
        run(*there, "link", "set", "lo", "up")
        run(*there, "address", "add", f"{address}/16", "dev", "eth0")
        run(*there, "link", "set", "eth0", "up")
        run(*there, "route", "add", "default", "via", MACHINE_ADDRESS)
        return network

    def enter(self) -> list[str]:
        """What is put in front of a command that shall run there."""
        return [
            "nsenter",
            f"--target={self._holder.pid}",
            *(f"--{each}" for each in _NAMESPACES),
        ]

    def close(self) -> None:
        """Ends it."""
        self._holder.kill()
        self._holder.wait()


def _comm(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""
