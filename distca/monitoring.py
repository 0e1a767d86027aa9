"""What every process does for Prometheus: one registry, and ``/metrics`` over HTTP."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Info, ProcessCollector, start_http_server

from distca import __version__


def process_registry(role: str) -> CollectorRegistry:
    """A registry for one process, with its version, CPU time, memory and open files.

    Args:
        role: what the process is: ``"control-plane"``, ``"attention-node"`` or ``"trainer"``.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Info("distca_build", "Version of distca, and what the process is.", registry=registry).info(
        {"version": __version__, "role": role}
    )
    return registry


class MetricsAddressError(OSError):
    """The metrics cannot be served where they were to be."""


class MetricsEndpoint:
    """Serves a registry under ``/metrics``, from a thread of its own, until it is closed.

    Args:
        host: address to listen on.
        port: of it; 0 takes any free one.
        registry: what is served.

    Raises:
        MetricsAddressError: the port is taken or not allowed, or the host is no address of this
            machine.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise MetricsAddressError(
                f"cannot serve metrics on {host}:{port}: {error}; choose another port, or 0 for "
                "any free one"
            ) from error

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stops listening and ends the thread; a scrape in progress is answered."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
