"""The offers of a machine to the transports; no library is loaded to find out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from data_plane.rdma import MIN_LOCKED_BYTES, RdmaPort, locked_bytes_limit, rdma_ports
from data_plane.transport import TransportName

NIXL_PACKAGES: Final = ("nixl_cu13", "nixl_cu12", "nixl")
"""The library's names, one for each version of CUDA."""

INSTALL_NIXL: Final = "pip install 'distca[nixl-cu13]' (or nixl-cu12)"

_RDMA_TLS = ("ib", "rc", "dc", "ud", "srd", "all", "*")
"""Beginnings of the names in UCX_TLS that stand for RDMA."""

_LOADING_SECONDS: Final = 30.0
"""Loading takes 0.1 s on a machine that has nothing else to do."""

_LOAD = """
try:
    import libucx
    libucx.load_library()
except ImportError:
    import ucxx
for line in open("/proc/self/maps"):
    path = line.split()[-1]
    if path.rpartition("/")[2].startswith("libucs.so"):
        print(path)
        break
"""
"""ucxx itself loads the library by libucx, where the wheels brought that."""


@dataclass(frozen=True, kw_only=True)
class TransportFacts:
    """The offers of a machine, or a container.

    Attributes:
        ports: of its RDMA devices.
        locked_bytes: that the process may lock; None without a limit.
        installed: the libraries that are there.
        ucxx_has_verbs: the UCX of ucxx knows RDMA.
        ucx_tls: UCX_TLS; None where it is not set.
        ucx_net_devices: UCX_NET_DEVICES, likewise.
    """

    ports: tuple[RdmaPort, ...] = ()
    locked_bytes: int | None = None
    installed: frozenset[TransportName] = frozenset(TransportName) - {TransportName.AUTO}
    ucxx_has_verbs: bool = False
    ucx_tls: str | None = None
    ucx_net_devices: str | None = None

    @property
    def active_ports(self) -> tuple[RdmaPort, ...]:
        return tuple(port for port in self.ports if port.active)

    @property
    def wanted_ports(self) -> tuple[RdmaPort, ...]:
        """The active ports that UCX_NET_DEVICES leaves in."""
        devices = self.ucx_net_devices
        return tuple(p for p in self.active_ports if devices is None or _names(devices, p))

    @property
    def may_lock_enough(self) -> bool:
        return self.locked_bytes is None or self.locked_bytes >= MIN_LOCKED_BYTES

    @property
    def left_out_by(self) -> str:
        """The variable by which somebody has kept RDMA from UCX; empty if nobody has."""
        if self.ucx_tls is not None and not _allows_rdma(self.ucx_tls):
            return f"UCX_TLS={self.ucx_tls}"
        if self.active_ports and not self.wanted_ports:
            return f"UCX_NET_DEVICES={self.ucx_net_devices}"
        return ""


def transport_facts(
    root: Path = Path("/"), environ: Mapping[str, str] | None = None
) -> TransportFacts:
    """Looks at this machine.

    Args:
        root: of the file system; only tests have another than ``/``.
        environ: the environment; None is that of the process.
    """
    environ = os.environ if environ is None else environ
    ports = rdma_ports(root)
    packages = {
        TransportName.UCXX: ("ucxx",),
        TransportName.NIXL: NIXL_PACKAGES,
        TransportName.LIBFABRIC: NIXL_PACKAGES,
    }
    installed = frozenset(
        transport
        for transport, names in packages.items()
        if any(find_spec(name) is not None for name in names)
    )
    asks = any(port.active for port in ports) and TransportName.UCXX in installed
    return TransportFacts(
        ports=ports,
        locked_bytes=locked_bytes_limit(root),
        installed=installed,
        ucxx_has_verbs=asks and "ib" in (ucx_modules() or ()),
        ucx_tls=environ.get("UCX_TLS"),
        ucx_net_devices=environ.get("UCX_NET_DEVICES"),
    )


@cache
def ucx_modules() -> frozenset[str] | None:
    """Transports that the UCX of ucxx loads as modules, for example ``{"cuda", "ib"}``; TCP and
    shared memory are built in. None if it cannot be loaded.

    Found out in a process of its own: one that loads it can open no other transport."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOAD],
            capture_output=True,
            text=True,
            timeout=_LOADING_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    path = done.stdout.strip()
    if done.returncode or not path:
        return None
    names = (module.name for module in (Path(path).parent / "ucx").glob("libuct_*.so*"))
    found = (re.match(r"libuct_([a-z]+)", name) for name in names)
    return frozenset(match[1] for match in found if match)


def _allows_rdma(tls: str) -> bool:
    """Returns whether a list of UCX's transports, which a ``^`` in front negates, leaves one for
    RDMA."""
    names = [name.strip().lstrip("\\") for name in tls.removeprefix("^").split(",")]
    if tls.startswith("^"):
        return not {"ib", "all"} & set(names)
    return any(name.startswith(_RDMA_TLS) for name in names)


def _names(devices: str, port: RdmaPort) -> bool:
    patterns = (pattern.strip() for pattern in devices.split(","))
    return any(
        pattern == "all" or fnmatchcase(port.name, pattern) or fnmatchcase(port.device, pattern)
        for pattern in patterns
    )
