"""Settings of the ucxx transport, and the UCX options that they stand for.

The defaults were measured on one host with UCX 1.21: with endpoint error handling on (without it
a dead peer hangs its partners) UCX drops shared memory and falls back to TCP in 8 KiB pieces,
1 GB/s. ``POSIX_ERROR_HANDLING`` brings shared memory back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from data_plane.rdma import usable_rdma_devices
from data_plane.ucx_options import UcxSettings


@dataclass(frozen=True, kw_only=True)
class UcxxSettings(UcxSettings):
    """The settings of a ``UcxxTransport`` for UCX.

    Attributes:
        max_unclaimed_messages: messages that may wait for an offer; of more, the oldest are
            dropped.
        max_unclaimed_bytes: the same, of what UCX holds of them.
        max_unclaimed_seconds: how long one may wait; then it is dropped.
        rdma: this UCX has verbs, and there is a device for them.
    """

    max_unclaimed_messages: int = 16384
    max_unclaimed_bytes: int = 2**30
    max_unclaimed_seconds: float = 600.0
    rdma: bool = False

    def _default_options(self) -> Mapping[str, str]:
        transports = ["posix", "tcp", "self"] if self.one_host else ["tcp", "self"]
        if self.rdma:
            transports.insert(0, "rc")
        if self.on_gpu:
            transports += ["cuda_copy", "cuda_ipc"]
        return {"TLS": ",".join(transports), "POSIX_ERROR_HANDLING": "y"}

    def _rdma_devices(self) -> tuple[str, ...]:
        # UCX warns of devices that none of its transports can use.
        return usable_rdma_devices() if self.rdma else ()
