"""What the wheel is built from: parsed, or a copy to be changed or built."""

from __future__ import annotations

import ast
import gc
import shutil
from functools import cache
from pathlib import Path

from tests import ROOT

PACKAGES = (
    "attention_node",
    "control_plane",
    "core_attention",
    "data_plane",
    "distca",
    "trainer_client",
)


@cache
def parsed_sources() -> tuple[tuple[str, ast.Module], ...]:
    """Each file of the library that is not generated, by its path."""
    # A greenlet that is collected meanwhile changes the depth that Python 3.11 counts.
    gc.disable()
    try:
        return tuple(
            (str(path.relative_to(ROOT)), ast.parse(path.read_text()))
            for package in PACKAGES
            for path in sorted((ROOT / package).rglob("*.py"))
            if path.parent.name != "v1"
        )
    finally:
        gc.enable()


def copy_sources(folder: Path) -> None:
    """Copies the packages and the files that building them reads into ``folder``."""
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, folder / file)
