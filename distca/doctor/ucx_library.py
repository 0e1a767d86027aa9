"""Which versions of the transports' libraries are installed."""

from __future__ import annotations

import importlib.metadata
from functools import cache

from data_plane.nixl.agent import import_nixl


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
