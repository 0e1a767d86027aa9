"""The commands in the documents run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import ROOT
from tests.deploy.helm.chart import TOOLS, VALUE_SETS
from tests.support.programs import ran
from tests.support.service_harness import client_of, running

KUBERNETES = ROOT / "docs" / "deploy_kubernetes.md"
RUNBOOK = ROOT / "docs" / "runbook.md"


def commands(document: Path) -> list[str]:
    """The lines of its code blocks, but for those that name a language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)
    return [line for kind, block in blocks if not kind for line in block.splitlines() if line]


def shell(command: str, path: str) -> subprocess.CompletedProcess[str]:
    """Runs ``command`` in the repository's root with ``path`` in front of PATH."""
    return ran(
        "bash",
        "-euo",
        "pipefail",
        "-c",
        command,
        env={**os.environ, "PATH": f"{path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
    )


def test_every_command_about_the_chart_runs() -> None:
    shown = commands(KUBERNETES)
    assert len(shown) > 12
    for command in shown:
        done = shell(command, str(TOOLS / "old"))
        assert done.returncode == 0, (command, done.stderr)


def test_every_value_set_is_shown() -> None:
    text = KUBERNETES.read_text()
    left_out = [name for name in VALUE_SETS if f"ci/{name}" not in text]
    # What a command without values renders.
    assert left_out == ["default-values.yaml"]


@contextmanager
def distca_path(folder: Path) -> Iterator[str]:
    """A folder with the ``distca`` of this Python."""
    folder.mkdir()
    tool = folder / "distca"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m distca "$@"\n')
    tool.chmod(0o755)
    yield str(folder)


@pytest.mark.timeout(600)
def test_every_command_about_the_doctor_runs(tmp_path: Path) -> None:
    """The port of the documents stands for that of a control plane on a free one."""
    with (
        running() as control_plane,
        client_of(control_plane.address) as client,
        distca_path(tmp_path / "bin") as path,
    ):
        client.register("node-a", data_address="127.0.0.1:1")
        for command in commands(RUNBOOK):
            done = shell(command.replace("localhost:7700", control_plane.address), path)
            assert done.returncode == 0, (command, done.stdout, done.stderr)
