"""Names of objects, and what Kubernetes makes of them: labels and names of 63 characters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.helm.chart import CHART, Manifest, helm, only, refusal, rendered

LONGEST_RELEASE = "distca" + "-0123456789abcdef" * 2 + "-0123456789abc"[:13]
"""Helm takes 53 characters."""

LONGEST = {
    "release": (LONGEST_RELEASE, ()),
    "other release": (LONGEST_RELEASE.replace("distca", "prefix"), ()),
    "fullnameOverride": ("rel", (f"fullnameOverride={'a' + 'b' * 252}",)),
    "nameOverride": ("rel", (f"nameOverride={'a' + 'b' * 252}",)),
}

REVISION = "-0123456789"
"""What a StatefulSet's controller adds to its name, for a label of its pods."""

KINDS = ("StatefulSet", "Deployment", "DaemonSet")


def pool(*settings: str, release: str = "rel") -> Manifest:
    """The workload of the attention nodes."""
    (found,) = (
        each
        for each in rendered("", *settings, release=release)
        if each["kind"] in KINDS
        and each["metadata"]["labels"]["app.kubernetes.io/component"] == "attention-node"
    )
    return found


def derived_from_pool(workload: Manifest) -> Iterator[str]:
    """The longest names and labels that controllers make of the workload's name."""
    name, spec = workload["metadata"]["name"], workload["spec"]
    if workload["kind"] == "StatefulSet":
        yield f"{name}-{spec['replicas'] - 1}"
        yield name + REVISION
    elif workload["kind"] == "DaemonSet":
        yield f"{name}-abcde"
    # The API server cuts what a ReplicaSet's pods are called; their labels hold hashes alone.


def labels_in(part: Any) -> Iterator[str]:
    """The values of all labels, selectors included."""
    if isinstance(part, list):
        for each in part:
            yield from labels_in(each)
    elif isinstance(part, dict):
        for key, value in part.items():
            if key in ("labels", "matchLabels"):
                yield from value.values()
            else:
                yield from labels_in(value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("longest", LONGEST)
def test_whatever_is_made_of_the_longest_names_fits(longest: str, kind: str) -> None:
    assert len(LONGEST_RELEASE) == 53
    release, settings = LONGEST[longest]
    many = [
        "attentionNode.replicas=1000",
        f"attentionNode.kind={kind}",
        "attentionNode.podDisruptionBudget.maxUnavailable=2",
        "monitoring.podMonitor.enabled=true",
        "monitoring.dashboards.enabled=true",
    ]
    manifests = rendered("mtls-own-authority-values.yaml", *settings, *many, release=release)
    for each in manifests:
        # Nothing is called after a ConfigMap.
        assert len(each["metadata"]["name"]) <= (253 if each["kind"] == "ConfigMap" else 63)
        assert all(len(text) <= 63 for text in labels_in(each)), each["metadata"]["name"]
        if each["kind"] == "Service":
            assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", each["metadata"]["name"])
        if each["kind"] == "Certificate":
            # As a common name may have.
            assert len(each["spec"]["commonName"]) <= 64
    for derived in derived_from_pool(pool(*settings, *many, release=release)):
        assert len(derived) <= 63, derived


def test_cut_names_of_different_releases_differ() -> None:
    names = {
        pool(f"fullnameOverride={'a' * 38}{end}")["metadata"]["name"] for end in ("x", "y", "xz")
    }
    assert len(names) == 3


@pytest.mark.parametrize(
    "value_set", ["autoscaling-hpa-values.yaml", "autoscaling-keda-values.yaml"]
)
def test_all_that_names_the_pool_names_it_alike(value_set: str) -> None:
    settings = [f"fullnameOverride={'a' * 40}", "monitoring.podMonitor.enabled=true"]
    manifests = rendered(value_set, *settings)
    workload = only(manifests, "StatefulSet")
    name, spec = workload["metadata"]["name"], workload["spec"]
    assert len(name) < 55
    template = spec["template"]
    for each in ("Service", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
        assert only(manifests, each, "attention-node")["metadata"]["name"] == name
    assert template["spec"]["serviceAccountName"] == name
    assert spec.get("serviceName", name) == name
    scaler = only(manifests, "ScaledObject" if "keda" in value_set else "HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] == name
    if "keda" in value_set:
        assert f'pod=~"{name}-.*"' in scaler["spec"]["triggers"][0]["metadata"]["query"]
    selector = only(manifests, "Service", "attention-node")["spec"]["selector"]
    assert selector.items() <= template["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("release", "settings", "kubernetes"),
    [
        ("distca-1.2", (), "1.35.0"),
        ("rel", ("fullnameOverride=a.b",), "1.35.0"),
        ("rel", ("fullnameOverride=1abc",), "1.35.0"),
        ("rel", ("nameOverride=a.b",), "1.35.0"),
        ("7b-run", (), "1.35.0"),
        ("7b-run", ("fullnameOverride=7.b",), "1.36.0"),
    ],
)
def test_names_that_services_cannot_have_are_refused(
    release: str, settings: tuple[str, ...], kubernetes: str
) -> None:
    named = settings[0].partition("=")[0] if settings else release
    assert named in refusal(*settings, release=release, kubernetes=kubernetes)


def test_digits_come_first_where_kubernetes_allows_it() -> None:
    done = helm("template", "7b-run", str(CHART), "--kube-version=1.36.0")
    assert done.returncode == 0, done.stderr
