"""Containers of what modules take and give, made anew with other contents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def filled(kind: type, values: Iterable[Any]) -> Any:
    """A tuple, named tuple or list of ``kind`` with ``values``."""
    make = getattr(kind, "_make", kind)
    return make(values)
