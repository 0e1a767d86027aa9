"""The errors that are shown in one line: those with advice for a person."""

from __future__ import annotations

import linecache

EXTRAS: dict[str, tuple[str, ...]] = {
    "flash_attn": ("fa4-cu13",),
    "greenlet": ("trainer",),
    "jinja2": ("trainer",),
    "matplotlib": ("trainer",),
    "nixl": ("nixl-cu13",),
    "opentelemetry": ("otel",),
    "psutil": ("node", "trainer"),
    "pyarrow": ("trainer",),
    "torch": ("node", "trainer"),
    "transformers": ("trainer",),
    "ucxx": ("ucxx-cu13",),
}
"""Extras that bring a module that the base installation lacks, any one of them."""

_OUR_PACKAGES = {
    "attention_node",
    "control_plane",
    "core_attention",
    "data_plane",
    "distca",
    "trainer_client",
}


def shown_error(error: Exception) -> tuple[str, str] | None:
    """Name and text of ``error`` for the person at the keyboard; None if it is a defect, of which
    the traceback is wanted.

    Errors that our packages define are meant for people, and so is a ``ValueError`` that they
    raise. So are those of the machine: a file that is not there, a port in use, a package that is
    not installed.
    """
    kind = type(error)
    if kind.__module__.partition(".")[0] in _OUR_PACKAGES:
        return kind.__name__, str(error)
    if isinstance(error, ImportError):
        return _missing(error)
    if isinstance(error, OSError):
        return kind.__name__, _of_machine(error)
    if kind is ValueError and _is_raised_here(error):
        return kind.__name__, str(error)
    return None


def _missing(error: ImportError) -> tuple[str, str] | None:
    module = (error.name or "").partition(".")[0]
    if module in _OUR_PACKAGES:
        return None
    if isinstance(error, ModuleNotFoundError) and module in EXTRAS:
        return (
            "MissingPackageError",
            f"this needs the package {module}, which is not installed: "
            + " or ".join(f"pip install 'distca[{extra}]'" for extra in EXTRAS[module]),
        )
    return type(error).__name__, str(error)


def _of_machine(error: OSError) -> str:
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}"


def _is_raised_here(error: Exception) -> bool:
    """Tests whether a ``raise`` of our packages made it: a value that a library refuses, or that an
    operation of Python does, is a defect."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None:
        return False
    package = str(at.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
    line = linecache.getline(at.tb_frame.f_code.co_filename, at.tb_lineno)
    return package in _OUR_PACKAGES and line.lstrip().startswith("raise ")
