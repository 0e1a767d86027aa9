"""A copy of what the wheel is built from, to be changed or built."""

from __future__ import annotations

import shutil
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


def copy_sources(folder: Path) -> None:
    """Copies the packages and the files that building them reads into ``folder``."""
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, folder / file)
