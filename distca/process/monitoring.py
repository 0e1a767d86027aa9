"""A registry for Prometheus, and ``/metrics`` over HTTP, of every process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Info, ProcessCollector, make_wsgi_app

from distca import __version__
from distca.contract.timeouts import default_seconds
from distca.machine_errors import ListenError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

LIVE_PATH: Final = "/livez"
READY_PATH: Final = "/readyz"

MAX_CONNECTIONS: Final = 32
"""Connections to a metrics endpoint at a time; one more closes the oldest."""

_SILENT_SECONDS: Final = default_seconds("scrape_seconds")
"""A scraper sends its request at once."""


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


def _always() -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Health:
    """Answers over HTTP, 200 or 503, to those who ask whether a process serves:
    kubelets above all, which show no certificate.

    Attributes:
        serves: whether the process serves, under ``/readyz``; called from any thread.
        is_alive: whether it goes on at all, though it may drain or stand by, under ``/livez``;
            called from any thread, and may block for a few seconds.
    """

    serves: Callable[[], bool]
    is_alive: Callable[[], bool] = _always


class MetricsEndpoint:
    """Serves a registry under ``/metrics``, from threads of its own, until it is closed.

    A client that says nothing, or says it slowly, holds one of MAX_CONNECTIONS places, and loses it
    when others want it.

    Args:
        host: address to listen on.
        port: of it; 0 takes any free one.
        registry: what is served.
        field: the setting that gives the address.
        health: what is answered under ``/livez`` and ``/readyz``; None: such pages are not found.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        *,
        field: str = "metrics_port",
        health: Health | None = None,
    ) -> None:
        server = _Server6 if ":" in host else _Server
        application = _application(registry, health)
        try:
            self._server = make_server(host, port, application, server, handler_class=_Handler)
        except (OSError, UnicodeError) as error:
            raise ListenError(field, host, port, error) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="distca-metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stops listening and ends the thread; a scrape in progress is answered."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _application(registry: CollectorRegistry, health: Health | None) -> WSGIApplication:
    shown = make_wsgi_app(registry)

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        asked = environ.get("PATH_INFO", "").rstrip("/")
        if asked in (LIVE_PATH, READY_PATH):
            status, text = _state(asked, health)
            start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{text}\n".encode()]
        return cast("Iterable[bytes]", shown(environ, start_response))

    return answer


def _state(asked: str, health: Health | None) -> tuple[str, str]:
    """Status line and text."""
    if health is None:
        return "404 Not Found", "this process has no health of its own"
    if asked == LIVE_PATH:
        return ("200 OK", "alive") if health.is_alive() else ("503 Service Unavailable", "stuck")
    if health.serves():
        return "200 OK", "serving"
    return "503 Service Unavailable", "not serving"


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, and a bounded number of them."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock = threading.Lock()
        self._connections: OrderedDict[int, socket.socket] = OrderedDict()
        super().__init__(*args, **kwargs)

    def server_bind(self) -> None:
        # WSGIServer would look the host's name up, which may take long and serves nobody.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._connections) >= MAX_CONNECTIONS:
                _, oldest = self._connections.popitem(last=False)
                # Its thread wakes up with an end of file, and closes it.
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._connections[id(request)] = request
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that went away or were closed are no news."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _SILENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""
