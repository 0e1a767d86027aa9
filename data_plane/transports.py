"""Chooses a transport by name. Its library is loaded only when it is opened."""

from __future__ import annotations

import threading
from enum import StrEnum
from typing import TYPE_CHECKING

from data_plane.transport import Transport

if TYPE_CHECKING:
    from data_plane.metrics import DataPlaneMetrics


class TransportName(StrEnum):
    """What moves the bytes; the same in all processes of a job."""

    UCXX = "ucxx"
    NIXL = "nixl"


class _Loaded:
    """Which library this process has loaded. Each brings a UCX of its own, and two of them in one
    process crash."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._name: TransportName | None = None

    def claim(self, name: TransportName) -> None:
        """Raises RuntimeError if another one was loaded before."""
        with self._lock:
            if self._name not in (None, name):
                raise RuntimeError(
                    f"this process has opened the {self._name} transport, so it cannot open "
                    f"{name}: each brings a UCX of its own; use one of them in a process"
                )
            self._name = name


_LOADED = _Loaded()


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
        RuntimeError: the library did not start, or this process has opened the other transport.
    """
    chosen = check_transport(name)
    _LOADED.claim(chosen)
    if chosen is TransportName.NIXL:
        from data_plane.nixl_settings import NixlSettings
        from data_plane.nixl_transport import NixlTransport

        return NixlTransport(NixlSettings(device=device, one_host=one_host), metrics)
    from data_plane.ucxx_settings import UcxxSettings
    from data_plane.ucxx_transport import UcxxTransport

    return UcxxTransport(UcxxSettings(device=device, one_host=one_host), metrics)
