"""The life of one pod on a node."""

from __future__ import annotations

import logging
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kubernetes.client import ApiException

from tests.kubernetes.api import STRATEGIC, Api, Object
from tests.kubernetes.containers import Image, PodFiles, Process
from tests.kubernetes.network import MACHINE_ADDRESS, PodNetwork
from tests.kubernetes.pod_status import ContainerState, PodStatus
from tests.kubernetes.probes import Probes
from tests.kubernetes.volumes import environment, expanded, make_volume, pod_path

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
RETRY_SECONDS = 1.0
BACK_OFF_SECONDS = 2.0
"""Between runs of a container; a real kubelet begins with ten."""

KNOWN_SPEC = {
    "activeDeadlineSeconds",
    "affinity",
    "automountServiceAccountToken",
    "containers",
    "dnsPolicy",
    "enableServiceLinks",
    "hostname",
    "initContainers",
    "nodeName",
    "nodeSelector",
    "preemptionPolicy",
    "priority",
    "restartPolicy",
    "schedulerName",
    "securityContext",
    "serviceAccount",
    "serviceAccountName",
    "subdomain",
    "terminationGracePeriodSeconds",
    "tolerations",
    "topologySpreadConstraints",
    "volumes",
}


@dataclass
class _Running:
    """A container that runs."""

    manifest: Object
    state: ContainerState
    process: Process
    probes: Probes


class PodRun(threading.Thread):
    """Runs a pod until it is deleted, or has ended by itself.

    Args:
        api: of the node.
        pod: bound to the node.
        folder: for its volumes and logs.
        image: what an image's name stands for.
        names: lines of /etc/hosts for the Services of a namespace.
    """

    def __init__(
        self,
        api: Api,
        pod: Object,
        folder: Path,
        image: Callable[[str], Image],
        names: Callable[[str], str],
    ) -> None:
        super().__init__(name=pod["metadata"]["name"])
        self._api = api
        self._pod = pod
        self._image = image
        self._names = names
        self._folder = folder
        self._killed = threading.Event()
        spec = pod["spec"]
        self._files = PodFiles(folder)
        self._status = PodStatus(
            MACHINE_ADDRESS,
            [
                ContainerState(each["name"], each["image"])
                for each in spec.get("initContainers", [])
            ],
            [ContainerState(each["name"], each["image"]) for each in spec["containers"]],
        )
        self._network: PodNetwork | None = None
        self._running: dict[str, _Running] = {}
        self._shown: Object = {}

    def see(self, pod: Object) -> None:
        """The pod as the API server has it now."""
        self._pod = pod

    def kill(self) -> None:
        """It is gone from the API server: all of it ends at once."""
        self._killed.set()

    def volume(self, name: str) -> Path:
        """The folder that a volume is, until the pod is gone."""
        return self._folder / "volumes" / name

    def logs(self) -> str:
        """What its containers wrote."""
        return "\n".join(
            f"--- {self.name} {path.stem}\n{path.read_text()}"
            for path in sorted(self._folder.glob("*.log"))
        )

    def run(self) -> None:
        try:
            unknown = set(self._pod["spec"]) - KNOWN_SPEC
            if unknown:
                raise NotImplementedError(f"this kubelet does not know {unknown} of pods")
            self._prepare()
            self._run_inits()
            self._run_containers()
        except _Over:
            pass
        except Exception:
            logger.exception("pod %s", self.name)
            self._status.ends = "Failed"
            self._show()
        finally:
            self._end()

    @property
    def _going(self) -> bool:
        return self._killed.is_set() or "deletionTimestamp" in self._pod["metadata"]

    def _pause(self, seconds: float) -> None:
        """Waits.

        Raises:
            _Over: the pod is to go meanwhile.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._going:
                raise _Over
            self._write_hosts()
            time.sleep(LOOK_SECONDS)

    def _prepare(self) -> None:
        """Network and volumes; waits for Secrets that are not there yet."""
        meta, spec = self._pod["metadata"], self._pod["spec"]
        self._network = PodNetwork.make(spec.get("hostname", meta["name"]))
        self._status.address = self._network.address
        (self._folder / "volumes").mkdir(parents=True)
        self._files.hosts.write_text("127.0.0.1 localhost\n")
        for volume in spec.get("volumes", []):
            while volume["name"] not in self._files.volumes:
                try:
                    self._files.volumes[volume["name"]] = make_volume(
                        self._api, self._pod, self._status.address, volume, self._folder / "volumes"
                    )
                except ApiException as error:
                    logger.warning("pod %s waits for volume %s: %s", self.name, volume, error.body)
                    self._pause(RETRY_SECONDS)
        self._show()

    def _write_hosts(self) -> None:
        """Names of Services and of pods that have one, as the cluster's DNS would tell them."""
        meta = self._pod["metadata"]
        hostname = self._pod["spec"].get("hostname", meta["name"])
        own = f"127.0.0.1 localhost\n{self._status.address} {hostname}\n"
        names = own + self._names(meta["namespace"])
        if names != self._files.hosts.read_text():
            self._files.hosts.write_text(names)

    def _services(self) -> list[Object]:
        return self._api.items(f"/api/v1/namespaces/{self._pod['metadata']['namespace']}/services")

    def _start(self, manifest: Object, state: ContainerState) -> _Running:
        address = self._status.address
        env = environment(self._api, self._pod, manifest, address, self._services())
        words = [*manifest.get("command", ["distca"]), *manifest.get("args", [])]
        context: Mapping[str, int] = {
            **self._pod["spec"].get("securityContext", {}),
            **manifest.get("securityContext", {}),
        }
        assert self._network is not None
        process = Process(
            self._network,
            self._files,
            self._image(manifest["image"]),
            manifest,
            context,
            env,
            [expanded(word, env) for word in words],
            self._folder / f"{manifest['name']}.log",
        )
        state.begins()
        running = _Running(manifest, state, process, Probes(manifest, process, address))
        self._running[manifest["name"]] = running
        return running

    def _run_inits(self) -> None:
        for manifest, state in zip(
            self._pod["spec"].get("initContainers", []), self._status.inits, strict=True
        ):
            while True:
                running = self._start(manifest, state)
                while running.process.exit_code() is None:
                    self._show()
                    self._pause(LOOK_SECONDS)
                state.ends(running.process.exit_code() or 0)
                if not state.failed:
                    state.ready = True
                    break
                if self._pod["spec"].get("restartPolicy") == "Never":
                    self._status.ends = "Failed"
                    self._show()
                    self._wait_until_it_goes()
                state.waits_to_start_again()
                self._show()
                self._pause(BACK_OFF_SECONDS)
        self._status.initialized = True

    def _run_containers(self) -> None:
        states = dict(
            zip(
                [each["name"] for each in self._pod["spec"]["containers"]],
                self._status.containers,
                strict=True,
            )
        )
        manifests = {each["name"]: each for each in self._pod["spec"]["containers"]}
        starts = dict.fromkeys(manifests, 0.0)
        while not all(state.done for state in states.values()):
            for name, state in states.items():
                if name in self._running and "running" in state.state:
                    if self._has_ended(self._running[name]):
                        starts[name] = time.monotonic() + BACK_OFF_SECONDS
                elif not state.done and time.monotonic() >= starts[name]:
                    self._start(manifests[name], state)
            self._show()
            self._pause(LOOK_SECONDS)
        failed = any(state.failed for state in states.values())
        self._status.ends = "Failed" if failed else "Succeeded"
        self._show()
        self._wait_until_it_goes()

    def _has_ended(self, running: _Running) -> bool:
        """Looks after a container; whether it has ended."""
        state, probes = running.state, running.probes
        state.started, state.ready = probes.started, probes.started and probes.ready
        if probes.failed:
            logger.warning("%s of %s: %s", state.name, self.name, probes.failed)
            running.process.signal(signal.SIGTERM)
            if not running.process.wait(self._pod["spec"]["terminationGracePeriodSeconds"]):
                running.process.kill()
        code = running.process.exit_code()
        if code is None:
            return False
        probes.stop()
        state.ends(code)
        policy = self._pod["spec"].get("restartPolicy", "Always")
        if policy == "Always" or (policy == "OnFailure" and code):
            state.waits_to_start_again()
        else:
            state.done = True
        return True

    def _wait_until_it_goes(self) -> None:
        while True:
            self._pause(RETRY_SECONDS)

    def _show(self) -> None:
        patch = self._status.as_patch()
        if patch == self._shown:
            return
        try:
            self._api.patch(f"{pod_path(self._pod)}/status", patch, STRATEGIC)
        except Exception as error:
            # Whatever the client raises: the next look shows it.
            if not self._killed.is_set():
                logger.warning("status of pod %s: %s", self.name, error)
        else:
            self._shown = patch

    def _end(self) -> None:
        """Ends its containers within the grace period, and tells the API server that it is gone."""
        meta = self._pod["metadata"]
        grace = meta.get("deletionGracePeriodSeconds", 0)
        deadline = time.monotonic() + (0 if self._killed.is_set() else grace)
        running = [each for each in self._running.values() if each.process.exit_code() is None]
        for each in running:
            each.probes.stop()
            hook = each.manifest.get("lifecycle", {}).get("preStop", {})
            if "sleep" in hook:
                time.sleep(min(hook["sleep"]["seconds"], max(deadline - time.monotonic(), 0)))
            elif "exec" in hook:
                each.process.run(hook["exec"]["command"], max(deadline - time.monotonic(), 0))
            each.process.signal(signal.SIGTERM)
        for each in running:
            while each.process.exit_code() is None:
                if self._killed.is_set() or time.monotonic() > deadline:
                    each.process.kill()
                time.sleep(LOOK_SECONDS)
            each.state.ends(each.process.exit_code() or 0)
        if self._network is not None:
            self._network.close()
        while not self._killed.is_set() and not self._leave():
            time.sleep(RETRY_SECONDS)
        shutil.rmtree(self._folder / "volumes", ignore_errors=True)

    def _leave(self) -> bool:
        """Tells the API server that it is gone; whether that worked."""
        self._show()
        try:
            uid = self._pod["metadata"]["uid"]
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
            self._api.delete(pod_path(self._pod), options)
        except ApiException as error:
            # The next pod of this name has another uid.
            return bool(error.status == 409)
        except Exception:
            # Whatever else the client raises.
            logger.exception("the end of pod %s", self.name)
            return False
        return True


class _Over(Exception):
    """The pod is to go."""
