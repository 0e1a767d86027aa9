"""Calls of compiled functions that have no wrapper for Python."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba


@functools.cache
def callable_from_python(function: Any) -> Callable[..., Any]:
    """``function``, which only compiled functions can call, for a test."""

    @numba.njit
    def run(*arguments):  # type: ignore[no-untyped-def]
        return function(*arguments)

    return run  # type: ignore[no-any-return]
