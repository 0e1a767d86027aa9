"""The ucxx transport's side of the bandwidth probe."""

from __future__ import annotations

import queue

from data_plane.probe_endpoint import ProbeEndpoint
from data_plane.ucxx.connection import UcxxConnection


class UcxxProbe(ProbeEndpoint):
    """The probe of one connection, which tells UCX's lanes."""

    _connection: UcxxConnection

    def _lanes(self, deadline: float) -> tuple[str, ...]:
        connection = self._connection
        answer: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
        connection.worker.submit(lambda: answer.put(connection.lanes()))
        try:
            return answer.get(timeout=self._seconds_left(deadline))
        except queue.Empty:
            raise self._timeout("asking UCX for its lanes") from None
