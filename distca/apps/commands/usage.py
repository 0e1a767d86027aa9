"""Turns a settings class's own complaint into a usage error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def as_usage_error() -> Iterator[None]:
    """A ``ValueError`` in the block becomes a usage error, exit code 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
