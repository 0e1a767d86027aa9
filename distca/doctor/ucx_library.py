"""Which library moves the bytes, which UCX it loads into a process, and what that can do."""

from __future__ import annotations

import importlib.metadata
import re
from functools import cache
from pathlib import Path

from data_plane.nixl_agent import import_nixl


@cache
def ucx_version() -> str | None:
    """Versions of ucxx and of the UCX that it has loaded; None if ucxx cannot be imported."""
    try:
        import ucxx
    except (ImportError, OSError):
        return None
    version = ".".join(str(part) for part in ucxx.get_ucx_version())
    return f"ucxx {ucxx.__version__}, UCX {version}"


@cache
def nixl_version() -> str | None:
    """Version of nixl, which brings a UCX of its own; None if it cannot be imported."""
    try:
        library = import_nixl()
    except (ImportError, OSError):
        return None
    # The package is named for its version of CUDA: nixl-cu13.
    name = str(library.__name__).replace("_", "-")
    return f"{name} {importlib.metadata.version(name)}"


@cache
def ucx_modules() -> frozenset[str] | None:
    """Transports that UCX loads as modules, for example ``{"cuda", "ib"}``; TCP and shared memory
    are built in. None if ucxx cannot be imported."""
    if ucx_version() is None:
        return None
    library = _loaded_library("libucs.so")
    if library is None:
        return frozenset()
    names = (path.name for path in (library.parent / "ucx").glob("libuct_*.so*"))
    found = (re.match(r"libuct_([a-z]+)", name) for name in names)
    return frozenset(match[1] for match in found if match)


def _loaded_library(name: str) -> Path | None:
    """Path of the shared library of this name in the running process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split()[-1]
        if Path(path).name.startswith(name):
            return Path(path)
    return None
