"""The common settings of all transports: devices and UCX options.

Both libraries move bytes with a UCX of their own, which reads the same ``UCX_*`` variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from data_plane.interfaces import interface_of_host

TCP_OPTIONS: Final[Mapping[str, str]] = {
    # The same in every process of a job, or connections reset.
    "TCP_TX_SEG_SIZE": "1M",
    "TCP_RX_SEG_SIZE": "1M",
    "TCP_KEEPIDLE": "1s",
    "TCP_KEEPINTVL": "1s",
    "TCP_KEEPCNT": "3",
    # UCX's own keepalive would keep the TCP one from ever being sent.
    "KEEPALIVE_INTERVAL": "1000s",
    "TCP_SYN_CNT": "2",
    "TCP_CM_SYN_CNT": "2",
    # A worker that is made anew listens on the port of the old one.
    "TCP_CM_REUSEADDR": "y",
    "TCP_CONN_NB": "y",
}
"""1 MiB segments make TCP five times faster, and a long UCX keepalive lets TCP's own see a cut link
within seconds."""

_GPU_BUSY_POLL_SECONDS = 0.002


@dataclass(frozen=True, kw_only=True)
class UcxSettings:
    """The settings of a transport for UCX. A subclass adds its own limits and the options it sets
    by default.

    Attributes:
        device: where the buffers live: ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``.
        one_host: every peer runs on this host and shares its IPC namespace: adds shared memory.
        data_host: address of this machine whose network interface, beside RDMA devices, is the
            only one that UCX uses and opens TCP ports on. None or 0.0.0.0: all of them.
        options: UCX options by name (with or without ``UCX_``). They win over ``UCX_*``
            environment variables, which win over the defaults.
        busy_poll_seconds: after activity, how long to poll before sleeping. None: 0 on the CPU
            (two polling processes on few cores only slow each other down), 2 ms on a GPU
            (sleeping costs cuda_ipc half of its bandwidth at 16 MiB).
        handshake_timeout_seconds: how long a client may take from its connection to its hello.
        max_half_open: clients that may have connected and not said hello; of more, the oldest of
            the host that has most go. An eighth of ``ulimit -n`` if that is less.
        max_probe_bytes: the largest probe message that a peer may make this side hold memory for.
        slowest_bytes_per_second: the slowest network worth using, which a connection counts with
            until it has measured its own (``Pings``).
    """

    device: str = "cpu"
    one_host: bool = False
    data_host: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    busy_poll_seconds: float | None = None
    handshake_timeout_seconds: float = 5.0
    max_half_open: int = 4096
    max_probe_bytes: int = 64 * 2**20
    slowest_bytes_per_second: float = 16 * 2**20

    def __post_init__(self) -> None:
        check_device(self.device)
        if self.busy_poll_seconds is not None and self.busy_poll_seconds < 0:
            raise ValueError(f"busy_poll_seconds is {self.busy_poll_seconds}; give 0 or more")
        for name, value in vars(self).items():
            if name.startswith(("max_", "slowest_", "handshake_")) and value <= 0:
                raise ValueError(f"{name} is {value}; give more than 0")

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def effective_busy_poll_seconds(self) -> float:
        if self.busy_poll_seconds is not None:
            return self.busy_poll_seconds
        return _GPU_BUSY_POLL_SECONDS if self.on_gpu else 0.0

    def bound_interface(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """The network interface that UCX is tied to by ``data_host``; None if it may use all, or
        those that the user names in ``NET_DEVICES``.
        """
        named = "UCX_NET_DEVICES" in {*environ, *(f"UCX_{name}" for name in self._own_options())}
        return None if self.data_host is None or named else interface_of_host(self.data_host)

    def context_options(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Returns the options for the UCX context, names without ``UCX_``.

        A default is left out where ``environ`` sets the option: UCX reads it from there.
        """
        defaults = {**self._default_options(), **self._net_devices(environ), **TCP_OPTIONS}
        chosen = {name: value for name, value in defaults.items() if f"UCX_{name}" not in environ}
        return chosen | self._own_options()

    def _own_options(self) -> dict[str, str]:
        return {name.removeprefix("UCX_"): value for name, value in self.options.items()}

    def _net_devices(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        # UCX listens on every interface that it may use, and its wire format trusts whoever calls.
        interface = self.bound_interface(environ)
        if interface is None:
            return {}
        return {"NET_DEVICES": ",".join((*self._rdma_devices(), interface))}

    def _default_options(self) -> Mapping[str, str]:
        """UCX options besides ``TCP_OPTIONS`` and devices."""
        raise NotImplementedError

    def _rdma_devices(self) -> tuple[str, ...]:
        """Names of the RDMA ports that UCX may use, as UCX_NET_DEVICES has them."""
        raise NotImplementedError


def check_device(device: str) -> None:
    """Raises ValueError unless ``device`` is ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``."""
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ValueError(f"device is {device!r}; valid: 'cpu', 'cuda', 'cuda:<index>'")
