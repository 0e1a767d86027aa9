"""The ucxx transport's side of the bandwidth probe."""

from __future__ import annotations

import queue
from typing import Any

from ucxx._lib.arr import Array

from data_plane.buffer_pool import BufferPool
from data_plane.probe_endpoint import MAX_CONTROL_BYTES, Operation, ProbeEndpoint
from data_plane.ucxx_connection import UcxxConnection, as_ucxx_array


class UcxxProbe(ProbeEndpoint):
    """The probe of one connection; takes over its control channel, whose tags are the operations.

    Args:
        connection: ucxx's.
        pool, max_probe_bytes: see ``ProbeEndpoint``.
    """

    _connection: UcxxConnection

    def __init__(self, connection: UcxxConnection, pool: BufferPool, max_probe_bytes: int) -> None:
        super().__init__(connection, pool, max_probe_bytes)
        connection.on_control = self._on_control

    def _lanes(self, deadline: float) -> tuple[str, ...]:
        connection = self._connection
        answer: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
        connection.worker.submit(lambda: answer.put(connection.lanes()))
        try:
            return answer.get(timeout=self._seconds_left(deadline))
        except queue.Empty:
            raise self._timeout("asking UCX for its lanes") from None

    def _on_control(self, operation: int, message: Any) -> None:
        worker = self._connection.worker
        if operation == Operation.DATA:
            self._receive_data(message)
            return
        if message.length > MAX_CONTROL_BYTES:
            worker.discard(message)
            return
        body = bytearray(max(message.length, 1))
        length = message.length
        request = worker.ucp.tag_recv_with_handle(Array(body), message)

        def on_complete(error: Exception | None) -> None:
            if error is None:
                self.take(operation, bytes(body[:length]))

        worker.track(request, body, on_complete)

    def _receive_data(self, message: Any) -> None:
        worker = self._connection.worker
        buffer = self._receive_buffer
        if buffer is None or message.length != buffer.nbytes:
            worker.discard(message)
            return
        buffer.retain()
        array = as_ucxx_array(buffer.tensor)
        request = worker.ucp.tag_recv_with_handle(array, message)

        def on_complete(error: Exception | None) -> None:
            buffer.release()
            self._received(done=error is None)

        worker.track(request, (array, buffer), on_complete)
