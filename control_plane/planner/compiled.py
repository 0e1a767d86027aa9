"""The one decorator for compiled functions: numba, cached on disk where that is possible."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """``function`` compiled by numba in nopython mode on first use.

    The machine code is kept beside the source or in numba's cache folder (``NUMBA_CACHE_DIR``). A
    cache folder that this process may only read, as in a container image, serves as well, through a
    temporary copy. Without any writable folder every process compiles anew.
    """
    return _compiled(function, {})


def compiled_inner(function: F) -> F:
    """The same for a function that only compiled functions call: without the wrapper that lets
    Python call it, which takes longer to compile than the function."""
    return _compiled(function, {"no_cpython_wrapper": True, "no_cfunc_wrapper": True})


def compiled_leaf(function: F) -> F:
    """The same for a function that neither makes nor returns arrays.

    It goes without counts of references to those it is passed, which take longer than what it does;
    and into its callers, because a call would copy its arguments: tuples of arrays, which come to
    hundreds of words, took over half of the time of the search for chunks.
    """
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": True}
    try:
        return _compiled(function, options | {"_nrt": False})
    except KeyError:  # a numba that has no such option
        return _compiled(function, options)


def _compiled(function: F, options: dict[str, Any]) -> F:
    _make_cache_writable()
    try:
        dispatcher = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no place where it may write
        return cast(F, numba.njit(**options)(function))
    # Numba looks at the file of a function alone, but its machine code holds that of the functions
    # it calls, in other files: without this, a change there would go unnoticed.
    cache_file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = _sources_stamp(function.__code__.co_filename)
    return cast(F, dispatcher)


@cache
def _make_cache_writable() -> None:
    """Gives numba a copy of its cache folder where that is read-only and would be ignored."""
    config: Any = numba.config
    if not config.CACHE_DIR or not Path(config.CACHE_DIR).is_dir():
        return
    if os.access(config.CACHE_DIR, os.W_OK):
        return
    try:
        copy = tempfile.mkdtemp(prefix="distca-numba-")
    except OSError:
        return
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    config.CACHE_DIR = shutil.copytree(config.CACHE_DIR, copy, dirs_exist_ok=True)


@cache
def _sources_stamp(path: str) -> tuple[tuple[str, int, int], ...]:
    """Changes whenever the source file ``path`` or one of this package does."""
    files = sorted({Path(path).resolve(), *Path(__file__).resolve().parent.glob("*.py")})
    return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
