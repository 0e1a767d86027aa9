"""The one error of offline planning and simulation: something the user handed in is wrong."""

from __future__ import annotations

import math


class InputError(ValueError):
    """A setting, a file or a length is invalid; the message names it and what is valid."""


def require_positive(name: str, value: float) -> None:
    """Raises :class:`InputError` unless ``value`` is a finite number above 0."""
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{name} is {value}; it must be a finite number above 0")


def require_not_negative(name: str, value: float) -> None:
    """Raises :class:`InputError` unless ``value`` is a finite number of 0 or more."""
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"{name} is {value}; it must be a finite number of 0 or more")


def require_count(name: str, value: int, at_least: int = 1) -> None:
    """Raises :class:`InputError` unless ``value`` is ``at_least`` or more."""
    if value < at_least:
        raise InputError(f"{name} is {value}; it must be {at_least} or more")
