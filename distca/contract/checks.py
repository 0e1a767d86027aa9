"""Checks of settings, with one wording: the field, its value, and what is valid."""

from __future__ import annotations

import dataclasses
import math


def check_least(settings: object, /, **least: float) -> None:
    """Each named field is a finite number of at least so much, or None.

    Raises:
        ValueError: one is not.
    """
    for name, lowest in least.items():
        value = getattr(settings, name)
        if value is not None and not (math.isfinite(value) and value >= lowest):
            raise ValueError(f"{name} is {value}; it must be {lowest} or more")


def check_positive(settings: object, /, *names: str) -> None:
    """Each named field is a finite number above 0, or None.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value}; it must be a positive number")


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
    """Each field of the dataclass whose name ends in ``_seconds`` is a positive number.

    Raises:
        ValueError: one is not.
    """
    names = (field.name for field in dataclasses.fields(settings))  # type: ignore[arg-type]
    check_positive(settings, *(name for name in names if name.endswith("_seconds")))
