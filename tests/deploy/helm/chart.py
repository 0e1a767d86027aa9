"""Renders the chart with the real helm, and reads what comes out."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests import ROOT
from tests.support.programs import ran

CHART = ROOT / "helm" / "distca"
TOOLS = Path(os.environ.get("DISTCA_CHART_TOOLS", ROOT / "build" / "chart-tools"))

VERSIONS = ("old", "new")
"""Folders of the tools: helm 3 with an older kubectl, and helm 4 with a newer one."""

VALUE_SETS = tuple(sorted(path.name for path in (CHART / "ci").glob("*-values.yaml")))

KUBE_VERSION = "--kube-version=1.34.0"
"""For which the value sets are rendered: it knows all that they ask for."""

NEEDS_KUBERNETES = {
    "dra-values.yaml": (1, 34),
}
"""The first version of Kubernetes for value sets that the oldest one does not know."""

RELEASE, NAMESPACE = "rel", "research"

Manifest = dict[str, Any]


def tools_are_there() -> bool:
    """Whether tools/fetch_chart_tools.py has run."""
    return all((TOOLS / name / ".fetched").is_file() for name in (*VERSIONS, "models"))


def helm(*arguments: str, version: str = "old") -> subprocess.CompletedProcess[str]:
    """Runs helm; its folders for caches and settings are left alone."""
    return ran(
        str(TOOLS / version / "helm"),
        *arguments,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
    )


@functools.cache
def rendered_text(
    value_set: str = "", *settings: str, version: str = "old", release: str = RELEASE
) -> str:
    """All manifests of a release as YAML, NOTES.txt not included.

    Args:
        value_set: name of a file in the chart's ``ci`` folder; empty for the defaults.
        settings: as for helm's ``--set``.
        version: of :data:`VERSIONS`.
        release: its name.
    """
    arguments = ["template", release, str(CHART), f"--namespace={NAMESPACE}", KUBE_VERSION]
    if value_set:
        arguments.append(f"--values={CHART / 'ci' / value_set}")
    arguments += [f"--set={setting}" for setting in settings]
    done = helm(*arguments, version=version)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(
    value_set: str = "", *settings: str, version: str = "old", release: str = RELEASE
) -> list[Manifest]:
    """The manifests of a release; see :func:`rendered_text`."""
    text = rendered_text(value_set, *settings, version=version, release=release)
    documents = yaml.load_all(text, yaml.CSafeLoader)
    return [document for document in documents if document]


def refusal(
    *settings: str, version: str = "old", release: str = RELEASE, kubernetes: str = "1.34.0"
) -> str:
    """What helm says when it refuses values."""
    arguments = ["template", release, str(CHART), f"--kube-version={kubernetes}"]
    done = helm(*arguments, *(f"--set={each}" for each in settings), version=version)
    assert done.returncode != 0, f"helm accepts {settings}"
    return done.stderr


def kinds(manifests: list[Manifest]) -> set[str]:
    """The kinds among ``manifests``."""
    return {manifest["kind"] for manifest in manifests}


def only(manifests: list[Manifest], kind: str, name_ends: str = "") -> Manifest:
    """The one manifest of ``kind`` whose name ends with ``name_ends``."""
    found = [
        manifest
        for manifest in manifests
        if manifest["kind"] == kind and manifest["metadata"]["name"].endswith(name_ends)
    ]
    assert len(found) == 1, f"{len(found)} of kind {kind} with a name that ends with {name_ends!r}"
    return found[0]


def pod_specs(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """(owner's kind and name, pod spec) of every pod that the manifests make."""
    for manifest in manifests:
        owner = f"{manifest['kind']} {manifest['metadata']['name']}"
        if manifest["kind"] == "Pod":
            yield owner, manifest["spec"]
        elif manifest["kind"] in ("Deployment", "StatefulSet", "DaemonSet"):
            yield owner, manifest["spec"]["template"]["spec"]
        elif manifest["kind"] == "JobSet":
            for job in manifest["spec"]["replicatedJobs"]:
                yield owner, job["template"]["spec"]["template"]["spec"]
        elif manifest["kind"] == "TrainingRuntime":
            for job in manifest["spec"]["template"]["spec"]["replicatedJobs"]:
                yield owner, job["template"]["spec"]["template"]["spec"]


def containers(pod_spec: Manifest) -> list[Manifest]:
    """Init containers and containers, in this order."""
    return [*pod_spec.get("initContainers", []), *pod_spec["containers"]]


def container(pod_spec: Manifest, name: str) -> Manifest:
    """The container or init container called ``name``."""
    return next(each for each in containers(pod_spec) if each["name"] == name)


def environment(of: Manifest) -> dict[str, Any]:
    """A container's environment: values as they stand, or the source of each."""
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in of.get("env", [])}
