"""The status of a pod, as the kubelet writes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from tests.kubernetes.api import Object


def now() -> str:
    """As the API writes times."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class ContainerState:
    """One container as far as it has come.

    Attributes:
        state, last: as in ``containerStatuses``.
        ready, started: by its probes.
        restarts: how often it was started again.
        done: it has ended, and is not started again.
    """

    name: str
    image: str
    state: Object = field(default_factory=lambda: {"waiting": {"reason": "PodInitializing"}})
    last: Object = field(default_factory=dict)
    ready: bool = False
    started: bool = False
    restarts: int = 0
    done: bool = False

    def begins(self) -> None:
        """It runs."""
        self.state = {"running": {"startedAt": now()}}

    def ends(self, code: int, reason: str = "") -> None:
        """It has ended."""
        began = self.state.get("running", {}).get("startedAt", now())
        reason = reason or ("Completed" if code == 0 else "Error")
        self.ready = self.started = False
        self.state = {
            "terminated": {
                "exitCode": code,
                "reason": reason,
                "startedAt": began,
                "finishedAt": now(),
            }
        }

    def waits_to_start_again(self) -> None:
        """It will be started once more."""
        self.last = self.state
        self.state = {"waiting": {"reason": "CrashLoopBackOff"}}
        self.restarts += 1

    @property
    def failed(self) -> bool:
        return bool(self.state.get("terminated", {}).get("exitCode"))

    def as_status(self) -> Object:
        """As in ``containerStatuses``."""
        return {
            "name": self.name,
            "image": self.image,
            "imageID": self.image,
            "state": self.state,
            "lastState": self.last,
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
        }


@dataclass
class PodStatus:
    """The status of one pod.

    Attributes:
        address: of the pod, when it has one.
        initialized: all init containers have succeeded.
        ends: Succeeded or Failed, when that is decided.
    """

    host: str
    inits: list[ContainerState]
    containers: list[ContainerState]
    address: str = ""
    initialized: bool = False
    ends: str = ""
    _changed: dict[str, tuple[bool, str]] = field(default_factory=dict)
    _begun: str = field(default_factory=now)

    def as_patch(self) -> Object:
        """For the pod's subresource ``status``."""
        ready = self.initialized and all(each.ready for each in self.containers)
        running = self.initialized and any("running" in each.state for each in self.containers)
        restarting = self.initialized and any(each.restarts for each in self.containers)
        phase = self.ends or ("Running" if running or restarting else "Pending")
        conditions = {
            "PodReadyToStartContainers": bool(self.address),
            "Initialized": self.initialized,
            "ContainersReady": ready,
            "Ready": ready,
        }
        status: Object = {
            "phase": phase,
            "hostIP": self.host,
            "startTime": self._begun,
            "conditions": [self._condition(name, met) for name, met in conditions.items()],
            "initContainerStatuses": [each.as_status() for each in self.inits],
            "containerStatuses": [each.as_status() for each in self.containers],
        }
        if self.address:
            status |= {"podIP": self.address, "podIPs": [{"ip": self.address}]}
        return {"status": status}

    def _condition(self, name: str, met: bool) -> Object:
        if self._changed.get(name, (not met, ""))[0] != met:
            self._changed[name] = (met, now())
        return {"type": name, "status": str(met), "lastTransitionTime": self._changed[name][1]}
