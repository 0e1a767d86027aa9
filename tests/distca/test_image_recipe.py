"""What the images' recipe runs of ours while it builds exists."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.distca.source_tree import ROOT

PROGRAMS = re.findall(
    r'^(?:RUN| *) /opt/distca/bin/python -c "([^"]+)"',
    (ROOT / "docker" / "Dockerfile").read_text(),
    re.M,
)


def test_the_recipe_runs_programs_of_ours() -> None:
    assert PROGRAMS


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_the_recipe_runs(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=100, check=True)
