"""Packages of a local run's processes beside those of the base installation."""

from __future__ import annotations

from importlib.util import find_spec

from data_plane.transport import TransportName
from distca.errors import MissingPackageError
from distca.shown_errors import EXTRAS

_OF_PROCESSES = {"node", "trainer"}


def check_packages(transport: TransportName) -> None:
    """
    Raises:
        MissingPackageError: some are not installed; names all of them, and what brings them.
    """
    needed = [module for module, extras in EXTRAS.items() if _OF_PROCESSES & {*extras}]
    missing = [module for module in needed if find_spec(module) is None]
    brought_by = ["trainer", "node"] if missing else []
    if transport in (TransportName.AUTO, TransportName.UCXX) and not _has_transport(transport):
        missing.append("ucxx")
        brought_by.extend(EXTRAS["ucxx"])
    if missing:
        raise MissingPackageError(
            f"distca local needs the packages {', '.join(missing)}, which are not installed: "
            f"pip install 'distca[{','.join(brought_by)}]'"
        )


def _has_transport(wanted: TransportName) -> bool:
    from data_plane.transport_facts import transport_facts

    installed = transport_facts().installed
    return bool(installed) if wanted is TransportName.AUTO else wanted in installed
