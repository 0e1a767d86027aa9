"""Chooses a transport by name. Its library is loaded only when it is opened."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from data_plane.transport import Transport

if TYPE_CHECKING:
    from data_plane.metrics import DataPlaneMetrics


class TransportName(StrEnum):
    """What moves the bytes; the same in all processes of a job."""

    UCXX = "ucxx"
    NIXL = "nixl"


def check_transport(name: str) -> TransportName:
    """Returns the transport called ``name``.

    Raises:
        ValueError: there is none.
    """
    try:
        return TransportName(name)
    except ValueError:
        valid = ", ".join(repr(str(each)) for each in TransportName)
        raise ValueError(f"transport is {name!r}; valid: {valid}") from None


def open_transport(
    name: str, *, device: str, one_host: bool, metrics: DataPlaneMetrics | None = None
) -> Transport:
    """Starts a transport.

    Args:
        name: a :class:`TransportName`.
        device: where the buffers live: ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``.
        one_host: every peer runs on this host and shares its IPC namespace.
        metrics: counts transfers, failures and probes when given.

    Raises:
        ValueError: no such transport, or an option is wrong.
        ImportError: its library is not installed; says what to install.
        RuntimeError: the library did not start.
    """
    if check_transport(name) is TransportName.NIXL:
        from data_plane.nixl_settings import NixlSettings
        from data_plane.nixl_transport import NixlTransport

        return NixlTransport(NixlSettings(device=device, one_host=one_host), metrics)
    from data_plane.ucxx_settings import UcxxSettings
    from data_plane.ucxx_transport import UcxxTransport

    return UcxxTransport(UcxxSettings(device=device, one_host=one_host), metrics)
