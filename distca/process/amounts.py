"""Amounts as people read them."""

from __future__ import annotations


def size_text(nbytes: int) -> str:
    """Bytes in the largest binary unit that they fill, for example ``1.5 GiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"


def duration_text(seconds: float, *, short: bool = False) -> str:
    """Seconds in the largest unit of which there are two: ``47 hours``, or in short ``47 h``."""
    for unit, brief, length in (("days", "d", 86400), ("hours", "h", 3600), ("minutes", "min", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {brief if short else unit}"
    return f"{int(seconds)} {'s' if short else 'seconds'}"
