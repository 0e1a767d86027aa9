"""The generated modules in ``distca/v1`` are what ``proto/`` says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests import ROOT


def generate(out_dir: Path) -> None:
    """Runs ``tools/generate_stubs.py``, which belongs to no package."""
    spec = importlib.util.spec_from_file_location(
        "generate_stubs", ROOT / "tools/generate_stubs.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.generate(out_dir)


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_stubs_are_up_to_date_and_none_is_left_over(tmp_path: Path) -> None:
    generate(tmp_path)
    fresh, checked_in = contents(tmp_path / "distca/v1"), contents(ROOT / "distca/v1")
    advice = "run python tools/generate_stubs.py, and delete files whose proto is gone"
    assert checked_in.keys() == fresh.keys(), advice
    assert [name for name in fresh if fresh[name] != checked_in[name]] == [], advice
