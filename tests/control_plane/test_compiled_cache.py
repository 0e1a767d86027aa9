"""Machine code that an image brings along is used although the image cannot be written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numba
import pytest

from control_plane.planner import compiled

CONFIG: Any = numba.config


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with one file, set as numba's."""
    folder = tmp_path / "cache"
    (folder / "planner").mkdir(parents=True)
    (folder / "planner" / "code.nbc").write_text("machine code")
    monkeypatch.setattr(CONFIG, "CACHE_DIR", str(folder))
    return folder


def test_a_read_only_cache_is_copied(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Permissions do not keep root out, so the answer about them is given here.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    compiled._make_cache_writable.__wrapped__()
    copy = Path(CONFIG.CACHE_DIR)
    assert copy != cache
    assert (copy / "planner" / "code.nbc").read_text() == "machine code"


def test_a_writable_cache_is_used_itself(cache: Path) -> None:
    compiled._make_cache_writable.__wrapped__()
    assert Path(CONFIG.CACHE_DIR) == cache


def test_numba_chooses_where_no_cache_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONFIG, "CACHE_DIR", "")
    compiled._make_cache_writable.__wrapped__()
    assert CONFIG.CACHE_DIR == ""
