"""helm lint, and values that must be refused by name."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.deploy.helm.chart import CHART, KUBE_VERSION, VALUE_SETS, VERSIONS, helm, rendered_text


@pytest.mark.parametrize("version", VERSIONS)
def test_lint_finds_nothing_in_any_value_set(version: str) -> None:
    assert len(VALUE_SETS) >= 12
    for name in VALUE_SETS:
        values = f"--values={CHART}/ci/{name}"
        linted = helm("lint", "--strict", KUBE_VERSION, str(CHART), values, version=version)
        assert linted.returncode == 0, (name, linted.stdout, linted.stderr)


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_both_helms_render_the_same(value_set: str) -> None:
    texts = [rendered_text(value_set, version=version) for version in VERSIONS]
    # The Secret of tokens is random.
    documents = [
        sorted(
            (each for each in yaml.load_all(text, yaml.CSafeLoader) if each["kind"] != "Secret"),
            key=json.dumps,
        )
        for text in texts
    ]
    assert documents[0] == documents[1]


def test_rendered_text_has_no_blank_lines_and_no_nulls() -> None:
    for name in VALUE_SETS:
        lines = rendered_text(name).splitlines()
        assert not [line for line in lines if line.isspace() or line.endswith((": null", "<nil>"))]


def test_the_package_holds_the_charts_files_alone(tmp_path: Path) -> None:
    packed = helm("package", str(CHART), f"--destination={tmp_path}")
    assert packed.returncode == 0, packed.stderr
    (path,) = tmp_path.glob("distca-*.tgz")
    with tarfile.open(path) as archive:
        names = archive.getnames()
    assert "distca/values.schema.json" in names
    assert any(name.startswith("distca/dashboards/") for name in names)
    assert any(name.startswith("distca/rules/") for name in names)
    allowed = (".yaml", ".json", ".tpl", ".txt", ".md", ".helmignore")
    assert not [name for name in names if not name.endswith(allowed)]
    assert not [name for name in names if name.startswith("distca/ci/")]
