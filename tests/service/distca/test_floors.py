"""Imports point down only: the floors of pyproject.toml, which ``make lint`` holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.distca.source_tree import copy_sources

WRONG_IMPORTS = {
    "control_plane/planner/costs.py": ("control_plane.errors", "imports core_attention alone"),
    "control_plane/jobs/job.py": ("data_plane.transport", "needs no torch, no data plane"),
    "attention_node/capacity.py": ("control_plane.settings", "Services meet only over proto/"),
    "core_attention/shape.py": ("data_plane.transport", "Bytes know nothing of attention"),
    "distca/contract/tokens.py": ("distca.apps.train.settings", "Imports point down only"),
}


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.timeout(240)
def test_a_wrong_import_fails(tmp_path: Path) -> None:
    copy_sources(tmp_path)
    clean = lint(tmp_path)
    assert clean.returncode == 0, clean.stdout
    for path, (wrong, _) in WRONG_IMPORTS.items():
        module = tmp_path / path
        module.write_text(f"{module.read_text()}\nimport {wrong}  # noqa\n")
    linted = lint(tmp_path)
    assert linted.returncode == 1, linted.stdout
    for path, (wrong, contract) in WRONG_IMPORTS.items():
        (verdict,) = [
            line
            for line in linted.stdout.splitlines()
            if contract in line and line.endswith((" KEPT", " BROKEN"))
        ]
        assert verdict.endswith("BROKEN"), verdict
        importer = path.removesuffix(".py").replace("/", ".")
        assert f"{importer} -> {wrong}" in linted.stdout
