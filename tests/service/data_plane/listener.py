"""A transport that listens, and how it fares by its metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from data_plane.metrics import DataPlaneMetrics
from data_plane.transport import AcceptCallback, Connection
from data_plane.ucxx.settings import UcxxSettings
from data_plane.ucxx.transport import UcxxTransport
from tests.service.data_plane.secret import proven


class Listener:
    """Takes everyone who knows the secret, unless ``accept`` decides.

    Attributes:
        accepted: the connections of those who were taken.
    """

    def __init__(
        self, settings: UcxxSettings | None = None, accept: AcceptCallback | None = None
    ) -> None:
        self._registry = CollectorRegistry()
        self.transport = UcxxTransport(settings, DataPlaneMetrics(self._registry))
        self.accepted: list[Connection] = []
        self.address = self.transport.listen("127.0.0.1", 0, accept or proven(self._take))

    def _take(self, hello: bytes, connection: Connection) -> bytes:
        self.accepted.append(connection)
        return b"welcome"

    def count(self, name: str, cause: str = "") -> float:
        """The value of one of its metrics; 0 where it has none."""
        labels = {"transport": "ucxx"} | ({"cause": cause} if cause else {})
        return self._registry.get_sample_value(f"distca_data_plane_{name}", labels) or 0.0

    def close(self) -> None:
        self.transport.close()
