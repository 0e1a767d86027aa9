"""The nixl transport's side of the bandwidth probe."""

from __future__ import annotations

from data_plane.buffer_pool import BufferPool
from data_plane.nixl.connection import NixlConnection
from data_plane.probe_endpoint import ProbeEndpoint


class NixlProbe(ProbeEndpoint):
    """The probe of one connection.

    Args:
        connection: nixl's.
        pool, max_probe_bytes: see ``ProbeEndpoint``.
    """

    _connection: NixlConnection

    def __init__(self, connection: NixlConnection, pool: BufferPool, max_probe_bytes: int) -> None:
        super().__init__(connection, pool, max_probe_bytes)
        connection.on_control = self.take
