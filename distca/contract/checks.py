"""Checks of settings, with one wording: the field, its value, and what is valid."""

from __future__ import annotations

import dataclasses
import math

MOST_SECONDS = 365 * 24 * 60 * 60
"""Of a setting; libraries' timers overflow somewhere above."""


def check_least(settings: object, /, **least: float) -> None:
    """Each named field is a finite number of at least so much, or None; seconds are at most
    :data:`MOST_SECONDS`.

    Raises:
        ValueError: one is not.
    """
    for name, lowest in least.items():
        value = getattr(settings, name)
        if value is not None and not (math.isfinite(value) and value >= lowest):
            raise ValueError(f"{name} is {value}; it must be {lowest} or more")
        _check_most(name, value)


def check_positive(settings: object, /, *names: str) -> None:
    """Each named field is a finite number above 0, or None; seconds are at most
    :data:`MOST_SECONDS`.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value}; it must be a positive number")
        _check_most(name, value)


def check_port(settings: object, /, *names: str) -> None:
    """Each named field is a port, 0 for any free one, or None.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 <= value < 2**16:
            raise ValueError(f"{name} is {value}; it must be 0 to 65535")


def check_seconds(settings: object, /) -> None:
    """Each field of the dataclass whose name ends in ``_seconds`` is a positive number of at most
    :data:`MOST_SECONDS`.

    Raises:
        ValueError: one is not.
    """
    names = (field.name for field in dataclasses.fields(settings))  # type: ignore[arg-type]
    check_positive(settings, *(name for name in names if name.endswith("_seconds")))


def _check_most(name: str, value: float | None) -> None:
    if name.endswith("_seconds") and value is not None and value > MOST_SECONDS:
        raise ValueError(f"{name} is {value}; it must be {MOST_SECONDS} (a year) or less")
