"""Probes as the kubelet makes them."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.kubernetes.api import Object
from tests.kubernetes.containers import Process

PATIENCE = 6.0
"""By how much timeouts are drawn out: two cores carry all pods, and commands of probes start a new
Python."""

_KINDS = ("startupProbe", "livenessProbe", "readinessProbe")


class Probes:
    """The probes of one run of a container; each asks in a thread of its own.

    Attributes:
        started: the startup probe has succeeded, or there is none.
        ready: the container is to be sent requests.
        failed: the container is to be started again; what was wrong.
    """

    def __init__(self, manifest: Object, process: Process, address: str) -> None:
        self._manifest = manifest
        self._process = process
        self._address = address
        self._over = threading.Event()
        self.started = "startupProbe" not in manifest
        self.ready = self.started and "readinessProbe" not in manifest
        self.failed = ""
        for kind in _KINDS:
            if kind in manifest:
                threading.Thread(target=self._ask_again_and_again, args=[kind], daemon=True).start()

    def stop(self) -> None:
        """Asks no more."""
        self._over.set()
        self.ready = False

    def _ask_again_and_again(self, kind: str) -> None:
        probe: Object = self._manifest[kind]
        self._over.wait(probe.get("initialDelaySeconds", 0))
        successes = failures = 0
        while not self._over.is_set():
            if kind == "startupProbe" or self.started:
                if self._succeeds(probe):
                    successes, failures = successes + 1, 0
                else:
                    successes, failures = 0, failures + 1
                if self._heed(kind, probe, successes, failures):
                    return
                self._over.wait(probe.get("periodSeconds", 10))
            else:
                self._over.wait(0.1)

    def _heed(self, kind: str, probe: Object, successes: int, failures: int) -> bool:
        """Whether this probe has nothing more to tell."""
        succeeded = successes >= int(probe.get("successThreshold", 1))
        failed = failures >= int(probe.get("failureThreshold", 3))
        if self._over.is_set():
            return True
        if kind == "readinessProbe":
            if succeeded or failed:
                self.ready = succeeded
            return False
        if failed:
            self.failed = f"{kind} failed {failures} times"
        if kind == "startupProbe" and succeeded:
            self.started = True
            self.ready = "readinessProbe" not in self._manifest
            return True
        return failed

    def _succeeds(self, probe: Object) -> bool:
        seconds = PATIENCE * float(probe.get("timeoutSeconds", 1))
        if "exec" in probe:
            return self._process.run(probe["exec"]["command"], seconds)
        if "tcpSocket" in probe:
            return _connects(self._address, self._port(probe["tcpSocket"]["port"]), seconds)
        if "httpGet" in probe:
            asked = probe["httpGet"]
            where = f"{self._address}:{self._port(asked['port'])}{asked.get('path', '/')}"
            return _answers(f"{asked.get('scheme', 'HTTP').lower()}://{where}", seconds)
        asked = probe["grpc"]
        return _serves(f"{self._address}:{asked['port']}", asked.get("service") or "", seconds)

    def _port(self, port: int | str) -> int:
        named = {each.get("name"): each["containerPort"] for each in self._manifest["ports"]}
        return int(named.get(port, port))


def _connects(address: str, port: int, seconds: float) -> bool:
    try:
        socket.create_connection((address, port), seconds).close()
    except OSError:
        return False
    return True


def _answers(url: str, seconds: float) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            return bool(200 <= answer.status < 400)
    except OSError:
        return False


def _serves(target: str, service: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    with grpc.insecure_channel(target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = stub.Check(request, timeout=deadline - time.monotonic())
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
