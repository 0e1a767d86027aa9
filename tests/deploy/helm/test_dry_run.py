"""kubectl and helm against an API server that knows the kinds but checks nothing.

What this shows: kubectl can parse every document, finds the resource for each kind and version, and
sees each object once. Field by field the manifests are checked in test_manifests.py.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.helm.api_server import api_server
from tests.deploy.helm.chart import (
    CHART,
    NAMESPACE,
    RELEASE,
    TOOLS,
    VALUE_SETS,
    VERSIONS,
    helm,
    rendered,
    rendered_text,
)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with api_server() as url:
        yield url


def apply(text: str, server: str, version: str, home: Path) -> subprocess.CompletedProcess[str]:
    """kubectl apply --dry-run=client of ``text``."""
    return subprocess.run(
        [
            str(TOOLS / version / "kubectl"),
            f"--server={server}",
            "apply",
            "--dry-run=client",
            "--validate=false",
            "--filename=-",
        ],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "HOME": str(home)},
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_kubectl_would_create_every_object(version: str, server: str, tmp_path: Path) -> None:
    for value_set in VALUE_SETS:
        done = apply(rendered_text(value_set), server, version, tmp_path)
        assert done.returncode == 0, (value_set, done.stderr)
        created = [line for line in done.stdout.splitlines() if line.endswith("created (dry run)")]
        assert len(created) == len(rendered(value_set))


def test_kubectl_refuses_a_kind_that_does_not_exist(server: str, tmp_path: Path) -> None:
    text = rendered_text().replace("apiVersion: apps/v1", "apiVersion: apps/v1beta1")
    done = apply(text, server, "old", tmp_path)
    assert done.returncode == 1
    assert 'no matches for kind "Deployment" in version "apps/v1beta1"' in done.stderr


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_notes_say_what_to_do_next(value_set: str, server: str) -> None:
    shown = helm(
        "install",
        RELEASE,
        str(CHART),
        f"--kube-apiserver={server}",
        "--disable-openapi-validation",
        f"--namespace={NAMESPACE}",
        "--dry-run=client",
        f"--values={CHART / 'ci' / value_set}",
    )
    assert shown.returncode == 0, shown.stderr
    notes = shown.stdout.partition("\nNOTES:\n")[2]
    tested = value_set != "bare-values.yaml"
    assert (f"helm -n {NAMESPACE} test {RELEASE} --logs" in notes) == tested
    assert "DISTCA_CONTROL_PLANE=" in notes
    secure = "mtls" in value_set or value_set == "customised-values.yaml"
    assert ("WARNING: gRPC is plaintext" in notes) != secure


@pytest.mark.parametrize(
    ("kind", "version", "warned"),
    [
        ("StatefulSet", "1.34.2", True),
        ("StatefulSet", "1.35.0", False),
        ("Deployment", "1.34.2", False),
    ],
)
def test_notes_say_where_a_rollout_goes_one_by_one(
    kind: str, version: str, warned: bool, tmp_path: Path
) -> None:
    with api_server(version) as url:
        shown = helm(
            "install",
            RELEASE,
            str(CHART),
            f"--kube-apiserver={url}",
            "--disable-openapi-validation",
            "--dry-run=server",
            f"--values={CHART / 'ci' / 'rolling-update-values.yaml'}",
            f"--set=attentionNode.kind={kind}",
        )
    assert shown.returncode == 0, shown.stderr
    notes = shown.stdout.partition("\nNOTES:\n")[2]
    assert ("replaces one pod of a\nStatefulSet at a time" in notes) == warned
