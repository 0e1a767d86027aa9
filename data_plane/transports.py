"""Chooses a transport by name. Its library is loaded only when it is opened."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from data_plane.transport import Transport, TransportName, check_transport
from data_plane.transport_choice import TransportChoice, choose_transport, named_transport
from data_plane.transport_facts import transport_facts

if TYPE_CHECKING:
    from data_plane.metrics import DataPlaneMetrics

logger = logging.getLogger(__name__)


class _Loaded:
    """The library that this process has loaded. Each brings a UCX of its own, and two of them in
    one process crash."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.name: TransportName | None = None

    def claim(self, name: TransportName) -> None:
        """Raises RuntimeError if another one was loaded before."""
        with self._lock:
            if self.name not in (None, name):
                raise RuntimeError(
                    f"this process has opened the {self.name} transport and cannot open {name}: "
                    "each brings a UCX of its own"
                )
            self.name = name


_LOADED = _Loaded()


def resolve_transport(
    name: str, *, one_host: bool, peers: Collection[TransportName] = ()
) -> TransportChoice:
    """The transport that ``name`` stands for on this machine, and why.

    Args:
        name: a :class:`TransportName`.
        one_host: every peer runs on this host.
        peers: what the servers of the pool use, if it has any.
    """
    given = check_transport(name)
    facts = transport_facts()
    if given is TransportName.AUTO and _LOADED.name is not None:
        # No other one could be opened.
        choice = named_transport(_LOADED.name, facts, one_host=one_host)
        return replace(choice, reason="this process has opened it before")
    if given is TransportName.AUTO:
        return choose_transport(facts, one_host=one_host, peers=peers)
    return named_transport(given, facts, one_host=one_host)


def open_transport(
    name: str | TransportChoice,
    *,
    device: str,
    one_host: bool,
    data_host: str | None = None,
    metrics: DataPlaneMetrics | None = None,
) -> Transport:
    """Starts a transport, and logs which one and why.

    Args:
        name: a :class:`TransportName`, or what one was resolved to.
        device: where the buffers live: ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``.
        one_host: every peer runs on this host and shares its IPC namespace.
        data_host: address of this machine whose interface, beside RDMA devices, is the only one
            that UCX uses and opens TCP ports on. None or 0.0.0.0: all of them.
        metrics: counts transfers, failures and probes when given.

    Raises:
        ValueError, ImportError, RuntimeError: it cannot be opened here.
    """
    choice = resolve_transport(name, one_host=one_host) if isinstance(name, str) else name
    _LOADED.claim(choice.name)
    _announce(choice)
    if metrics is not None:
        metrics.transport_chosen(choice)
    if choice.name is not TransportName.UCXX:
        from data_plane.nixl.libfabric import LibfabricTransport
        from data_plane.nixl.settings import NixlSettings
        from data_plane.nixl.transport import NixlTransport

        over_libfabric = choice.name is TransportName.LIBFABRIC
        return (LibfabricTransport if over_libfabric else NixlTransport)(
            NixlSettings(
                device=device,
                one_host=one_host,
                data_host=data_host,
                backend="LIBFABRIC" if over_libfabric else "UCX",
            ),
            metrics,
        )
    from data_plane.ucxx.settings import UcxxSettings
    from data_plane.ucxx.transport import UcxxTransport

    settings = UcxxSettings(device=device, one_host=one_host, data_host=data_host, rdma=choice.rdma)
    return UcxxTransport(settings, metrics)


def _announce(choice: TransportChoice) -> None:
    """Logs a choice; that RDMA devices lie idle is never left unsaid."""
    logger.info("transport %s: %s", choice.name, choice.reason)
    if choice.obstacles:
        logger.warning(
            "rows do not travel over this machine's RDMA devices: %s. %s. Or give --one-host if "
            "all processes are on this machine, --transport=ucxx if TCP is meant",
            choice.idle,
            choice.advice,
        )
