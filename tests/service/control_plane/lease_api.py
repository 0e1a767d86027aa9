"""As much of the Kubernetes API as a Lease and a pod's labels need, over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from control_plane.leadership.kubernetes_api import KubernetesApi

_PATH = "/apis/coordination.k8s.io/v1/namespaces/distca/leases"
_PODS = "/api/v1/namespaces/distca/pods/"


class LeaseApi:
    """An API server that knows Leases and labels of pods of the namespace ``distca``.

    Attributes:
        leases: by name, as JSON objects.
        labels: of each pod, by its name.
        patches: how many were asked for.
        authorizations: headers of all requests that brought one.
        broken: while set, every request fails with status 500.
        silent: while set, requests are not answered.
    """

    def __init__(self) -> None:
        self.leases: dict[str, dict[str, Any]] = {}
        self.labels: dict[str, dict[str, str]] = {}
        self.patches = 0
        self.authorizations: list[str] = []
        self.broken = threading.Event()
        self.silent = threading.Event()
        self.closing = threading.Event()
        self._versions = iter(range(1, 1 << 30))
        self._lock = threading.Lock()
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                self._answer(self._body())

            def do_PUT(self) -> None:
                self._answer(self._body())

            def do_PATCH(self) -> None:
                self._answer(self._body())

            def _body(self) -> dict[str, Any]:
                body: dict[str, Any] = json.loads(
                    self.rfile.read(int(self.headers["Content-Length"]))
                )
                return body

            def _answer(self, body: dict[str, Any] | None) -> None:
                while api.silent.is_set() and not api.closing.wait(0.02):
                    pass
                if header := self.headers["Authorization"]:
                    api.authorizations.append(header)
                status, answer = api.handle(self.command, self.path, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Tests tell what matters."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def handle(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[int, dict[str, Any]]:
        """Status and body of the answer."""
        if self.broken.is_set():
            return 500, _failure(500, "etcd is away")
        with self._lock:
            if path.startswith(_PODS):
                assert (method, body is None) == ("PATCH", False)
                return 200, self._patch(path.removeprefix(_PODS), body or {})
            name = path.removeprefix(_PATH).removeprefix("/")
            if method == "GET":
                lease = self.leases.get(name)
                return (200, lease) if lease else (404, _failure(404, f"no lease {name}"))
            assert body is not None
            if method == "POST":
                name = body["metadata"]["name"]
                if name in self.leases:
                    return 409, _failure(409, "already exists")
            elif body["metadata"].get("resourceVersion") != self.version(name):
                return 409, _failure(409, "the object has been modified")
            body["metadata"]["resourceVersion"] = str(next(self._versions))
            self.leases[name] = body
            return 200, body

    def _patch(self, pod: str, body: dict[str, Any]) -> dict[str, Any]:
        """Merges labels; null removes one."""
        self.patches += 1
        labels = self.labels.setdefault(pod, {})
        for name, value in body["metadata"]["labels"].items():
            if value is None:
                labels.pop(name, None)
            else:
                labels[name] = value
        return {"metadata": {"name": pod, "labels": labels}}

    def version(self, name: str) -> str:
        version: str = self.leases[name]["metadata"]["resourceVersion"]
        return version

    def holder(self, name: str) -> str:
        """Who holds a Lease; empty if nobody does."""
        lease = self.leases.get(name)
        return str(lease["spec"].get("holderIdentity") or "") if lease else ""

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.server.server_port}"

    def client(self) -> KubernetesApi:
        """A real client of it."""
        return KubernetesApi(self.url)


def _failure(status: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "code": status, "message": message}


@contextmanager
def lease_api() -> Iterator[LeaseApi]:
    """An API server that runs until the block ends."""
    api = LeaseApi()
    thread = threading.Thread(target=api.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield api
    finally:
        api.closing.set()
        api.server.shutdown()
        api.server.server_close()
        thread.join(5)
