"""Every manifest of every value set against the schemas of Kubernetes and custom resources."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import kubernetes_validate
import pytest

from tests.deploy.helm.chart import (
    NEEDS_KUBERNETES,
    VALUE_SETS,
    Manifest,
    kinds,
    pod_specs,
    rendered,
)
from tests.deploy.helm.custom_resources import (
    complaints_of_models,
    is_custom,
    knows,
)

KUBERNETES = ("1.27.0", "1.30.0", "1.34.0", "1.37.0")
"""The oldest version that Chart.yaml allows, and newer ones."""


def all_manifests(
    kubernetes: str = KUBERNETES[-1], value_sets: Iterable[str] = VALUE_SETS
) -> list[Manifest]:
    """The manifests of value sets for that version of Kubernetes, equal ones once."""
    version = tuple(int(number) for number in kubernetes.split(".")[:2])
    distinct = {
        json.dumps(manifest, sort_keys=True): manifest
        for value_set in value_sets
        if version >= NEEDS_KUBERNETES.get(value_set, version)
        for manifest in rendered(value_set)
    }
    return list(distinct.values())


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.timeout(300)
def test_manifests_match_the_schemas_of_kubernetes(version: str) -> None:
    core = [manifest for manifest in all_manifests(version) if not is_custom(manifest)]
    assert len(core) > 40
    for manifest in core:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_every_custom_resource_can_be_checked() -> None:
    custom = [manifest for manifest in all_manifests() if is_custom(manifest)]
    assert len(kinds(custom)) > 5
    assert all(knows(manifest) for manifest in custom)


@pytest.mark.timeout(300)
def test_custom_resources_match_their_definitions(tmp_path: Path) -> None:
    assert complaints_of_models(all_manifests(), tmp_path) == ""


def test_pods_get_no_variables_of_services() -> None:
    """A release called distca would have DISTCA_CONTROL_PLANE_PORT=tcp://..., beside our own."""
    for owner, spec in pod_specs(all_manifests()):
        assert spec["enableServiceLinks"] is False, owner


def test_objects_have_names_of_the_release_a_namespace_and_the_standard_labels() -> None:
    # In which these names and namespaces are the user's own.
    own = {"customised-values.yaml"}
    for manifest in all_manifests(value_sets=sorted({*VALUE_SETS} - own)):
        metadata = manifest["metadata"]
        assert metadata["name"].startswith("rel-distca")
        assert len(metadata["name"]) <= 63
        assert metadata["namespace"] == "research"
        assert metadata["labels"]["app.kubernetes.io/instance"] == "rel"
        assert metadata["labels"]["app.kubernetes.io/name"] == "distca"
