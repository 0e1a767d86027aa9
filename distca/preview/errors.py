"""Wrong input of a preview becomes one line on stderr and exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console

from core_attention.errors import ManifestError, PlanError, ProfileError, ScheduleError
from distca.process.plain_text import plain
from distca.simulator.errors import InputError

WRONG_INPUT_EXIT_CODE = 2

_DRAWING_PACKAGES = {"matplotlib", "jinja2"}


@contextmanager
def wrong_input_ends() -> Iterator[None]:
    """Shows an error about what the user handed in, by name and in one line, and exits.

    So do an output that cannot be written, and a missing package of the drawings. Other errors
    pass: they are defects.
    """
    try:
        yield
    except ImportError as error:
        if error.name not in _DRAWING_PACKAGES:
            raise
        _end(f"MissingPackage: {error.name} is not installed; drawings need distca[trainer]")
    except OSError as error:
        _end(f"{type(error).__name__}: {error}")
    except (InputError, ManifestError, PlanError, ProfileError, ScheduleError) as error:
        _end(f"{type(error).__name__}: {error}")


def _end(message: str) -> NoReturn:
    name, _, rest = " ".join(message.split()).partition(": ")
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"[bold red]{name}[/]: ", end="")
    console.print(plain(rest), markup=False, highlight=False)
    raise typer.Exit(WRONG_INPUT_EXIT_CODE)
