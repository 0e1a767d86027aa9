"""A small kubelet: registers a node, and runs the pods that the scheduler puts there.

It knows what the chart uses, and says so when it meets anything else. It has the rights of a real
one, by the authorizer for nodes. It asks the API server again and again where a real one watches.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.kubernetes.api import STRATEGIC, Api
from tests.kubernetes.containers import Image
from tests.kubernetes.network import MACHINE_ADDRESS
from tests.kubernetes.pod import PodRun
from tests.kubernetes.pod_status import now

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.3
HEARTBEAT_SECONDS = 5.0
JOIN_SECONDS = 60.0


class Kubelet:
    """One node.

    Args:
        api: of the user ``system:node:NAME``.
        name: of the node.
        folder: for its pods.
        image: what an image's name stands for.
        names: lines of /etc/hosts for the Services of a namespace.
        capacity: of the node, such as ``{"cpu": "8"}``.
    """

    def __init__(
        self,
        api: Api,
        name: str,
        folder: Path,
        image: Callable[[str], Image],
        names: Callable[[str], str],
        capacity: Mapping[str, str],
    ) -> None:
        self.name = name
        self._api = api
        self._folder = folder
        self._image = image
        self._names = names
        self._capacity = {"pods": "50", **capacity}
        self._labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        self._pods: dict[str, PodRun] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)
        self._heart = threading.Thread(target=self._beat, name=f"{name}-heartbeat")

    def start(self) -> None:
        """Registers the node, and runs pods from now on."""
        self._folder.mkdir(parents=True)
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": self._labels},
        }
        self._api.create("/api/v1/nodes", node)
        self._show()
        self._heart.start()
        self._thread.start()

    def close(self) -> None:
        """Ends whatever still runs."""
        self._over.set()
        for run in self._pods.values():
            run.kill()
        for thread in (self._thread, self._heart, *self._pods.values()):
            if thread.is_alive():
                thread.join(JOIN_SECONDS)

    def find(self, uid: str) -> PodRun | None:
        """What runs here of a pod, if it does."""
        return self._pods.get(uid)

    def _show(self) -> None:
        status = {
            "capacity": self._capacity,
            "allocatable": self._capacity,
            "addresses": [{"type": "InternalIP", "address": MACHINE_ADDRESS}],
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "KubeletReady",
                    "lastHeartbeatTime": now(),
                }
            ],
        }
        path = f"/api/v1/nodes/{self.name}/status"
        self._api.patch(path, {"status": status}, STRATEGIC)

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT_SECONDS):
            try:
                self._show()
            except Exception:
                # Whatever the client raises: the next one may succeed.
                logger.exception("heartbeat of %s", self.name)

    def _run(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            try:
                self._look()
            except Exception:
                # Likewise.
                logger.exception("%s", self.name)

    def _look(self) -> None:
        found = self._api.items("/api/v1/pods", fieldSelector=f"spec.nodeName={self.name}")
        pods = {pod["metadata"]["uid"]: pod for pod in found}
        for uid, pod in pods.items():
            if uid in self._pods:
                self._pods[uid].see(pod)
            elif pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
                run = PodRun(self._api, pod, self._folder / uid, self._image, self._names)
                self._pods[uid] = run
                run.start()
        for uid, run in self._pods.items():
            if uid not in pods:
                run.kill()
