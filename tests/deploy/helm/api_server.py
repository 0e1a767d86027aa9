"""As much of a Kubernetes API server as a client-side dry run asks for: which kinds there are, and
that no object exists yet. It checks nothing itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar

KINDS: dict[str, tuple[str, ...]] = {
    "v1": ("ConfigMap", "Pod", "Secret", "Service", "ServiceAccount"),
    "apps/v1": ("DaemonSet", "Deployment", "StatefulSet"),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
    "coordination.k8s.io/v1": ("Lease",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
    "cert-manager.io/v1": ("Certificate", "Issuer"),
    "jobset.x-k8s.io/v1alpha2": ("JobSet",),
    "leaderworkerset.x-k8s.io/v1": ("LeaderWorkerSet",),
    "resource.k8s.io/v1": ("ResourceClaimTemplate",),
    "resource.nvidia.com/v1beta1": ("ComputeDomain",),
    "keda.sh/v1alpha1": ("ScaledObject",),
    "monitoring.coreos.com/v1": ("PodMonitor", "PrometheusRule", "ServiceMonitor"),
    "trainer.kubeflow.org/v1alpha1": ("TrainJob", "TrainingRuntime"),
}
"""Every kind that the chart may create, by API version; a new one has to be added here."""


def _plural(kind: str) -> str:
    lower = kind.lower()
    return f"{lower[:-1]}ies" if lower.endswith("y") else f"{lower}s"


def _resources(version: str) -> dict[str, Any]:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": version,
        "resources": [
            {
                "name": _plural(kind),
                "singularName": kind.lower(),
                "namespaced": True,
                "kind": kind,
                "verbs": verbs,
            }
            for kind in KINDS[version]
        ],
    }


def _groups() -> dict[str, Any]:
    groups = []
    for version in KINDS:
        group, _, number = version.rpartition("/")
        if group:
            named = {"groupVersion": version, "version": number}
            groups.append({"name": group, "versions": [named], "preferredVersion": named})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def _answers(version: str) -> dict[str, Any]:
    """What is answered, by path."""
    major, minor, _ = version.split(".")
    by_path: dict[str, Any] = {
        "/version": {"major": major, "minor": minor, "gitVersion": f"v{version}"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": _groups(),
    }
    for group in KINDS:
        by_path[f"/{'apis' if '/' in group else 'api'}/{group}"] = _resources(group)
    return by_path


class _Handler(BaseHTTPRequestHandler):
    answers: ClassVar[dict[str, Any]]

    def do_GET(self) -> None:
        found = self.answers.get(self.path.partition("?")[0])
        missing = {"kind": "Status", "apiVersion": "v1", "reason": "NotFound", "code": 404}
        body = json.dumps(found or missing).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


@contextmanager
def api_server(version: str = "1.33.0") -> Iterator[str]:
    """Runs the server, of that version of Kubernetes; gives its URL."""
    handler = type("Handler", (_Handler,), {"answers": _answers(version)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
