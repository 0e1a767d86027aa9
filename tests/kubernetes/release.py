"""A release of the chart in a cluster, and what helm says of it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.helm.chart import CHART, TOOLS
from tests.kubernetes.api import Api, Object, pods_path
from tests.kubernetes.containers import ROOT

VALUES = CHART / "ci" / "cpu-values.yaml"

INSTALL_SECONDS = 900
"""Several processes that import PyTorch, on two busy cores."""

TEST_SECONDS = 300

UNINSTALL_SECONDS = 120.0
"""Pods end within their grace period."""

DRAIN_SECONDS = 20

_OF_EVERY_NAMESPACE = {"kube-root-ca.crt", "openshift-service-ca.crt"}
"""ConfigMaps that controllers put into each namespace when they come to it."""


@dataclass
class Release:
    """One release, called as the documents call it.

    Attributes:
        api: of the administrator.
        kubeconfig: likewise.
        namespace: which is made when it is installed.
    """

    api: Api
    kubeconfig: Path
    namespace: str
    name: str = "distca"

    def helm(self, *arguments: str, fails: bool = False) -> str:
        """What helm prints."""
        done = subprocess.run(
            [str(TOOLS / "new" / "helm"), *arguments, f"--namespace={self.namespace}"],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.kubeconfig.parent),
                "KUBECONFIG": str(self.kubeconfig),
            },
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS + 60,
            check=False,
        )
        assert bool(done.returncode) == fails, f"{arguments}:\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def install(self, *settings: str, chart: Path = CHART) -> None:
        """Installs it for CPUs, and waits until all pods are ready."""
        self._apply("install", settings, chart)

    def upgrade(self, *settings: str, chart: Path = CHART) -> None:
        """Likewise."""
        self._apply("upgrade", settings, chart)

    def _apply(self, verb: str, settings: tuple[str, ...], chart: Path) -> None:
        self.helm(
            verb,
            self.name,
            str(chart),
            f"--values={VALUES}",
            f"--set=attentionNode.drainSeconds={DRAIN_SECONDS}",
            *(f"--set={setting}" for setting in settings),
            "--wait",
            f"--timeout={INSTALL_SECONDS}s",
        )

    def test(self) -> None:
        """Runs `helm test`, which must succeed."""
        said = self.helm("test", self.name, f"--timeout={TEST_SECONDS}s")
        assert "Phase:          Succeeded" in said, said
        # Its pods stay for whoever reads their logs.
        for pod in yaml.safe_load_all(self.helm("get", "hooks", self.name)):
            self.api.delete(f"{pods_path(self.namespace)}/{pod['metadata']['name']}")

    def uninstall(self, others: set[str]) -> None:
        """Takes it away.

        Args:
            others: all objects that the cluster had before.

        Raises:
            AssertionError: something stays.
        """
        self.helm("uninstall", self.name, "--wait")
        deadline = time.monotonic() + UNINSTALL_SECONDS
        while left := all_objects(self.api) - others:
            assert time.monotonic() < deadline, f"left behind: {sorted(left)}"
            time.sleep(1.0)

    def pods(self, component: str) -> list[Object]:
        """The pods of a component that are not on their way out."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        found = self.api.items(pods_path(self.namespace), labelSelector=selector)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def leader(self) -> Object | None:
        """The control plane's pod that has the leader's label."""
        labelled = [
            pod
            for pod in self.pods("control-plane")
            if pod["metadata"]["labels"].get("distca.io/leader") == "true"
        ]
        return labelled[0] if len(labelled) == 1 else None

    @property
    def lease_path(self) -> str:
        """Of the Lease by which the leader leads."""
        leases = f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases"
        return f"{leases}/{self.name}-control-plane"

    def lease(self) -> Object:
        """What it says."""
        return dict(self.api.get(self.lease_path)["spec"])


def make_namespace(api: Api, name: str, *, restricted: bool) -> None:
    """One with all that controllers put into it.

    Args:
        restricted: it takes only pods that pass Pod Security Standard *restricted*.
    """
    labels = {"pod-security.kubernetes.io/enforce": "restricted"} if restricted else {}
    api.create("/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})
    there = f"/api/v1/namespaces/{name}"
    for path in (f"{there}/serviceaccounts/default", f"{there}/configmaps/kube-root-ca.crt"):
        wait_until(path, functools.partial(api.find, path), 60.0)


def is_ready(pod: Object) -> bool:
    """As the kubelet has told."""
    conditions = pod.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def restarts(pod: Object) -> int:
    """Of all containers of a pod."""
    status = pod["status"]
    found = [*status.get("initContainerStatuses", []), *status["containerStatuses"]]
    return sum(each["restartCount"] for each in found)


def wait_until(what: str, holds: Callable[[], Any], seconds: float) -> Any:
    """What ``holds`` returns once that is true.

    Raises:
        AssertionError: it does not come to be.
    """
    deadline = time.monotonic() + seconds
    while True:
        found = holds()
        if found:
            return found
        assert time.monotonic() < deadline, f"in {seconds:g} s it has not come to be: {what}"
        time.sleep(0.3)


def all_objects(api: Api) -> set[str]:
    """All objects of all kinds in the cluster, but those that come and go by themselves."""
    found = set()
    for group in ["/api/v1", *_groups(api)]:
        for resource in api.get(group)["resources"]:
            if "/" in resource["name"] or "list" not in resource["verbs"]:
                continue
            if resource["name"] in ("events", "componentstatuses"):
                continue
            for item in api.items(f"{group}/{resource['name']}"):
                meta = item["metadata"]
                if meta["name"] in _OF_EVERY_NAMESPACE:
                    continue
                where = meta.get("namespace", "")
                found.add(f"{group} {resource['name']} {where} {meta['name']}")
    return found


def _groups(api: Api) -> list[str]:
    groups = api.get("/apis")["groups"]
    return [f"/apis/{each['preferredVersion']['groupVersion']}" for each in groups]


def checkout_of(commit: str, folder: Path) -> Path:
    """The project as it was, in ``folder``."""
    folder.mkdir(parents=True)
    packed = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, capture_output=True, check=True, timeout=60
    ).stdout
    subprocess.run(["tar", "--extract", f"--directory={folder}"], input=packed, check=True)
    environment = Path(sys.prefix)
    if environment.is_relative_to(ROOT):
        # Where this checkout's is mounted.
        (folder / environment.relative_to(ROOT)).mkdir(parents=True)
    return folder
