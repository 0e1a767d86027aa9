"""Settings of the nixl transport, and the UCX options that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from data_plane.rdma import usable_rdma_devices
from data_plane.ucx_options import UcxSettings

LIBFABRIC: Final = "LIBFABRIC"
LIBFABRIC_NEEDS: Final = (
    "it needs libfabric 2.7 or newer (symbols FABRIC_1.10), libhwloc, and CUDA's libraries"
)


@dataclass(frozen=True, kw_only=True)
class NixlSettings(UcxSettings):
    """The settings of a ``NixlTransport`` for nixl, which moves bytes with a UCX of its own or the
    system's libfabric.

    Attributes:
        backend: of nixl.
        max_unclaimed_offers: offers of a peer that one connection may have waiting for a put; one
            more fails the connection.
    """

    backend: Literal["UCX", "LIBFABRIC"] = "UCX"
    max_unclaimed_offers: int = 16384

    def _default_options(self) -> Mapping[str, str]:
        # Where rdma-core is installed, the module for EFA takes libefa.so.1 from it and with that a
        # second libnl: the process then ends in a segmentation fault (seen with nixl 1.5.1).
        options = {"MODULES": "^efa"}
        # Left to itself, UCX takes the fastest that reaches the peer, RDMA before TCP. Two
        # containers of one host may seem to share memory that they do not share.
        return options if self.one_host else {**options, "TLS": "^sm"}

    def _rdma_devices(self) -> tuple[str, ...]:
        return usable_rdma_devices()
