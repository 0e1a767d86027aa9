"""Machine code is there before a control plane serves; an image that is read-only brings it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numba
import pytest

from control_plane.planner import compiled
from tests.support.programs import ran_python

CONFIG: Any = numba.config


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with one file, set as numba's."""
    folder = tmp_path / "cache"
    (folder / "planner").mkdir(parents=True)
    (folder / "planner" / "code.nbc").write_text("machine code")
    monkeypatch.setattr(CONFIG, "CACHE_DIR", str(folder))
    return folder


@pytest.mark.parametrize("writable", [True, False])
def test_a_read_only_cache_is_copied(
    cache: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    # Permissions do not keep root out, so the answer about them is given here.
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    compiled._make_cache_writable.__wrapped__()
    used = Path(CONFIG.CACHE_DIR)
    assert (used == cache) is writable
    assert (used / "planner" / "code.nbc").read_text() == "machine code"
    # Where none is set, numba chooses.
    monkeypatch.setattr(CONFIG, "CACHE_DIR", "")
    compiled._make_cache_writable.__wrapped__()
    assert CONFIG.CACHE_DIR == ""


_COMPILED_AFTER_PREPARING = """
import gc, json
from numba.core.registry import CPUDispatcher
from control_plane.planner.planners import PLANNERS, prepare
from control_plane.planner.planning import PlanningOptions
from tests.support.planning_cases import SHAPE, in_place, pool, stream_manifest

def signatures():
    return {
        f"{each.py_func.__module__}.{each.__name__}": len(each.signatures)
        for each in gc.get_objects()
        if isinstance(each, CPUDispatcher) and each.py_func.__module__.startswith("control_plane")
    }

planner = PLANNERS["balanced"]
prepare(planner)
before = signatures()
assert sum(before.values()) > 0
lengths = [9000, 200, 5000, 30, 700, 8000]
for manifest in (
    stream_manifest(lengths, 2),
    stream_manifest(lengths, 2, n_nano_batches=2),
    stream_manifest(lengths, 2, span=True),
):
    for servers in (in_place(2), pool(3), in_place(2) + pool(1), in_place(2, capacity_rows=60_000)):
        planner(manifest, servers, SHAPE, PlanningOptions(tolerance=0.1))
now = signatures()
print(json.dumps([name for name in now if now[name] != before.get(name, 0)]))
"""


def test_a_step_compiles_nothing_that_was_not_prepared() -> None:
    """It takes a minute, in which the control plane would answer nobody."""
    done = ran_python(_COMPILED_AFTER_PREPARING, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


_WITHOUT_FOLDER = """
import os, sys
from numba.core import caching
caching.CacheImpl._locator_classes = [caching.UserProvidedCacheLocator]
from control_plane.planner import compiled, sorting
print(compiled.cache_folder(), compiled.has_cache(), compiled.temporary_cache(), sep="|")
"""


def test_without_a_folder_of_its_own_a_temporary_one_is_used() -> None:
    done = ran_python(
        _WITHOUT_FOLDER,
        env={name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"},
        check=True,
    )
    folder, has_cache, why = done.stdout.strip().split("|")
    assert "distca-numba-" in folder
    assert has_cache == "True"
    assert "no folder" in why
    assert not Path(folder).exists(), "it goes with the process"


def test_code_that_is_not_in_the_cache_is_not_compiled(tmp_path: Path) -> None:
    program = (
        "from control_plane.planner.planners import PLANNERS, load; "
        "print(load(PLANNERS['balanced']))"
    )
    done = ran_python(program, env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}, check=True)
    assert done.stdout.split() == ["False"]
    assert not list(tmp_path.rglob("*.nbi"))


def test_a_division_by_zero_raises_nothing() -> None:
    """Out of a function without counts of references an error is not safe."""

    @compiled.compiled_leaf
    def share(part: float, whole: float) -> float:
        return part / whole

    @compiled.compiled
    def shares(part: float, whole: float) -> float:
        return share(part, whole)

    assert shares(1.0, 0.0) == math.inf
