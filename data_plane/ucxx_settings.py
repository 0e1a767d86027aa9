"""Settings of the ucxx transport, and the UCX options that they stand for.

The defaults were measured on one host with UCX 1.21: with endpoint error handling on (without it
a dead peer hangs its partners) UCX drops shared memory and falls back to TCP in 8 KiB pieces,
1 GB/s. ``POSIX_ERROR_HANDLING`` brings shared memory back.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from data_plane.ucx_options import (
    TCP_OPTIONS,
    check_device,
    choose_options,
    warn_about_allocator,
)


@dataclass(frozen=True, kw_only=True)
class UcxxSettings:
    """How a ``UcxxTransport`` uses UCX.

    Attributes:
        device: where the buffers live: ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``.
        one_host: every peer runs on this host and shares its IPC namespace: adds shared memory.
        options: UCX options by name (with or without ``UCX_``). They win over ``UCX_*``
            environment variables, which win over the defaults.
        busy_poll_seconds: after activity, how long to poll before sleeping. None: 0 on the CPU
            (two polling processes on few cores only slow each other down), 2 ms on a GPU
            (sleeping costs cuda_ipc half of its bandwidth at 16 MiB).
        handshake_timeout_seconds: how long a client may take from its connection to its hello.
        max_unclaimed_messages: messages that one connection may have waiting for an offer;
            one more fails the connection.
        max_probe_bytes: the largest probe message that a peer may make this side hold memory for.
        slowest_bytes_per_second: the slowest network worth using. UCX sends the messages of a
            connection in order, so a ping behind a large one is given the large one's time at
            this rate.
    """

    device: str = "cpu"
    one_host: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    busy_poll_seconds: float | None = None
    handshake_timeout_seconds: float = 5.0
    max_unclaimed_messages: int = 16384
    max_probe_bytes: int = 64 * 2**20
    slowest_bytes_per_second: float = 16 * 2**20

    def __post_init__(self) -> None:
        check_device(self.device)
        if self.busy_poll_seconds is not None and self.busy_poll_seconds < 0:
            raise ValueError(f"busy_poll_seconds is {self.busy_poll_seconds}; give 0 or more")
        for name in (
            "handshake_timeout_seconds",
            "max_unclaimed_messages",
            "max_probe_bytes",
            "slowest_bytes_per_second",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give more than 0")

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def effective_busy_poll_seconds(self) -> float:
        if self.busy_poll_seconds is not None:
            return self.busy_poll_seconds
        return 0.002 if self.on_gpu else 0.0

    def context_options(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Returns the options for the UCX context, names without ``UCX_``.

        A default is left out where ``environ`` sets the option: UCX reads it from there.
        """
        defaults = {
            "TLS": self._default_transports(),
            "POSIX_ERROR_HANDLING": "y",
            **TCP_OPTIONS,
        }
        return choose_options(defaults, self.options, environ)

    def warn_about_environment(self, environ: Mapping[str, str] = os.environ) -> None:
        """Logs a warning for surroundings that silently cost bandwidth."""
        warn_about_allocator(self.device, environ)

    def _default_transports(self) -> str:
        transports = ["posix", "tcp", "self"] if self.one_host else ["tcp", "self"]
        if self.on_gpu:
            transports += ["cuda_copy", "cuda_ipc"]
        return ",".join(transports)
