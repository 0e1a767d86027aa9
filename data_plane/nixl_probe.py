"""The nixl transport's side of the bandwidth probe."""

from __future__ import annotations

from data_plane.buffer_pool import BufferPool, PooledBuffer
from data_plane.nixl_connection import NixlConnection
from data_plane.posted_transfer import CONTROL_CHANNEL
from data_plane.probe_endpoint import RESPONDER_TIMEOUT_SECONDS, ProbeEndpoint
from data_plane.transport import Transfer, TransferState


class NixlProbe(ProbeEndpoint):
    """The probe of one connection; its messages have tags of their own, from 0 on.

    Args:
        connection: nixl's.
        pool, max_probe_bytes: see ``ProbeEndpoint``.
    """

    _connection: NixlConnection

    _OFFERS = 4
    """On offer at a time: more than are under way."""

    def __init__(self, connection: NixlConnection, pool: BufferPool, max_probe_bytes: int) -> None:
        super().__init__(connection, pool, max_probe_bytes)
        self._repeats = self._next_tag = 0
        connection.on_control = self.take

    def _data_tag(self, number: int) -> int:
        return number

    def _expect_data(self, buffer: PooledBuffer, repeats: int) -> None:
        self._repeats, self._next_tag = repeats, 0
        for _ in range(min(repeats, self._OFFERS)):
            self._offer_next(buffer)

    def _offer_next(self, buffer: PooledBuffer) -> None:
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        transfer = self._connection.offer_on_channel(
            CONTROL_CHANNEL, tag, buffer, RESPONDER_TIMEOUT_SECONDS
        )
        transfer.add_done_callback(lambda ended: self._on_ended(ended, buffer))

    def _on_ended(self, transfer: Transfer, buffer: PooledBuffer) -> None:
        done = transfer.state is TransferState.DONE
        # Before the last one gives the buffer back.
        if done and self._next_tag < self._repeats:
            self._offer_next(buffer)
        self._received(done=done)
