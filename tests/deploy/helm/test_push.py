"""`make push-chart` pushes the chart; installed from its registry, it asks for images there."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests import ROOT
from tests.deploy.helm.chart import TOOLS, VERSIONS, containers, helm, pod_specs
from tests.deploy.registry import PROGRAM, registry_on_loopback
from tests.support.programs import ran

pytestmark = pytest.mark.skipif(
    shutil.which(PROGRAM) is None, reason=f"needs {PROGRAM} (Debian: apt install {PROGRAM})"
)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    with registry_on_loopback(tmp_path) as address:
        yield address


@pytest.mark.parametrize("version", VERSIONS)
def test_the_chart_is_installed_from_where_it_was_pushed(
    registry: str, version: str, tmp_path: Path
) -> None:
    pushed = ran(
        *("make", "--no-print-directory", "push-chart", f"REGISTRY={registry}/ML/"),
        *(f"HELM={TOOLS / version / 'helm'}", "HELM_PUSH_OPTIONS=--plain-http"),
        f"RELEASE={tmp_path}/release",
    )
    assert pushed.returncode == 0, pushed.stderr
    known = json.loads((tmp_path / "release/chart.json").read_text())
    tag = yaml.safe_load((ROOT / "helm/distca/Chart.yaml").read_text())["version"]
    assert known["image.name"] == f"{registry}/ml/charts/distca:{tag}"
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", known["containerimage.digest"])

    shown = helm(
        *("template", "rel", f"oci://{registry}/ml/charts/distca", "--plain-http"),
        version=version,
    )
    assert shown.returncode == 0, shown.stderr
    manifests = [each for each in yaml.safe_load_all(shown.stdout) if each]
    images = {each["image"] for _, spec in pod_specs(manifests) for each in containers(spec)}
    assert len(images) == 2
    assert all(image.startswith(f"{registry}/ml/distca/") for image in images)
