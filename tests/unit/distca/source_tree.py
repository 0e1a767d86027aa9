"""The packages of the wheel, and their parsed sources."""

from __future__ import annotations

import ast
import gc
from functools import cache

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
