"""Settings of the ucxx transport, and the UCX options that they stand for.

The defaults were measured on one host with UCX 1.21: with endpoint error handling on (without it
a dead peer hangs its partners) UCX drops shared memory and falls back to TCP in 8 KiB pieces,
1 GB/s. ``POSIX_ERROR_HANDLING`` brings shared memory back, 1 MiB segments make TCP five times
faster, and a long UCX keepalive lets TCP's own see a cut link within seconds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

_COMMON_OPTIONS = {
    "POSIX_ERROR_HANDLING": "y",
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
    "TCP_CONN_NB": "y",
}


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
        kind, _, index = self.device.partition(":")
        if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
            raise ValueError(f"device is {self.device!r}; valid: 'cpu', 'cuda', 'cuda:<index>'")
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
        defaults = {"TLS": self._default_transports(), **_COMMON_OPTIONS}
        chosen = {name: v for name, v in defaults.items() if f"UCX_{name}" not in environ}
        return chosen | {name.removeprefix("UCX_"): v for name, v in self.options.items()}

    def warn_about_environment(self, environ: Mapping[str, str] = os.environ) -> None:
        """Logs a warning for surroundings that silently cost bandwidth."""
        if self.on_gpu and sets_expandable_segments(environ):
            logger.warning(
                "PYTORCH_CUDA_ALLOC_CONF sets expandable_segments:True: cuda_ipc cannot export "
                "such memory and transfers between GPUs fall back to copies through the host; "
                "set expandable_segments:False"
            )

    def _default_transports(self) -> str:
        transports = ["posix", "tcp", "self"] if self.one_host else ["tcp", "self"]
        if self.on_gpu:
            transports += ["cuda_copy", "cuda_ipc"]
        return ",".join(transports)


def sets_expandable_segments(environ: Mapping[str, str]) -> bool:
    """Whether PyTorch is told to allocate GPU memory that cuda_ipc cannot export."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    settings = ",".join(environ.get(name, "") for name in names)
    return "expandable_segments:true" in settings.replace(" ", "").lower()
