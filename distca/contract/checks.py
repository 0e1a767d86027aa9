"""Checks of settings, with one wording: the field, its value, and what is valid."""

from __future__ import annotations

import dataclasses
import math
from numbers import Integral, Real
from pathlib import Path
from typing import Any

MOST_SECONDS = 365 * 24 * 60 * 60
"""The most that a setting may be; libraries' timers overflow somewhere above."""


def check_least(settings: object, /, **least: float) -> None:
    """Each named field is a finite number of at least so much, or None; seconds are at most
    :data:`MOST_SECONDS`.
    """
    for name, lowest in least.items():
        value = getattr(settings, name)
        if value is not None and not (_is_finite(value) and value >= lowest):
            raise ValueError(f"{name} is {value!r}; it must be {lowest} or more")
        _check_most(name, value)


def check_positive(settings: object, /, *names: str) -> None:
    """Each named field is a finite number above 0, or None; seconds are at most
    :data:`MOST_SECONDS`.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and not (_is_finite(value) and value > 0):
            raise ValueError(f"{name} is {value!r}; it must be a positive number")
        _check_most(name, value)


def check_port(settings: object, /, *names: str) -> None:
    """Each named field is a port, 0 for any free one, or None."""
    for name in names:
        value = getattr(settings, name)
        if value is not None:
            check_range(name, value, 0, 2**16 - 1)


def check_range(name: str, value: Any, low: int, high: int) -> None:
    """``value`` is an integer, also one of numpy, of these bounds."""
    if not isinstance(value, Integral):
        raise ValueError(f"{name} is {value!r}; it must be an integer, {low} to {high}")
    if not low <= int(value) <= high:
        raise ValueError(f"{name} is {value}; it must be {low} to {high}")


def check_bool(settings: object, /, *names: str) -> None:
    """Each named field is True or False, or what equals one of them, or None."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value not in (True, False):
            raise ValueError(f"{name} is {value!r}; it must be True or False")


def check_host(settings: object, /, *names: str) -> None:
    """Each named field is a text that may be a host: not an empty one."""
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(
                f"{name} is {value!r}; give a name or IPv4 address of this machine that other "
                "machines reach, or leave it out"
            )


def take_paths(settings: object, /, *names: str) -> None:
    """Makes each named field that is a text, as people write paths, the path that it declares."""
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, str):
            object.__setattr__(settings, name, Path(value))


def check_seconds(settings: object, /) -> None:
    """Each field of the dataclass whose name ends in ``_seconds`` is a positive number of at most
    :data:`MOST_SECONDS`.
    """
    names = (field.name for field in dataclasses.fields(settings))  # type: ignore[arg-type]
    check_positive(settings, *(name for name in names if name.endswith("_seconds")))


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _check_most(name: str, value: float | None) -> None:
    if name.endswith("_seconds") and value is not None and value > MOST_SECONDS:
        raise ValueError(f"{name} is {value}; it must be {MOST_SECONDS} (a year) or less")
