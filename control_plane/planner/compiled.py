"""The one decorator for compiled functions: numba, cached on disk where that is possible."""

from __future__ import annotations

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

    The machine code is kept beside the source or in numba's cache folder (``NUMBA_CACHE_DIR``). In
    an image without any writable folder it is compiled again by every process instead.
    """
    return _compiled(function, {})


def compiled_inner(function: F) -> F:
    """The same for a function that only compiled functions call: without the wrapper that lets
    Python call it, which takes longer to compile than the function."""
    return _compiled(function, {"no_cpython_wrapper": True, "no_cfunc_wrapper": True})


def compiled_leaf(function: F) -> F:
    """The same for a function that neither makes nor returns arrays: without counts of references
    to those it is passed, which take longer than what it does."""
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    try:
        return _compiled(function, options | {"_nrt": False})
    except KeyError:  # a numba that has no such option
        return _compiled(function, options)


def _compiled(function: F, options: dict[str, Any]) -> F:
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
def _sources_stamp(path: str) -> tuple[tuple[str, int, int], ...]:
    """Changes whenever the source file ``path`` or one of this package does."""
    files = sorted({Path(path).resolve(), *Path(__file__).resolve().parent.glob("*.py")})
    return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
