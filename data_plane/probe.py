"""Is the network path as fast as it should be? A check of what a bandwidth probe measured.

A silent fallback, NVLink or RDMA to TCP, is the most common complaint of everyone who runs UCX.
"""

from __future__ import annotations

import logging
from typing import Literal

from data_plane.transport import ProbeResult, TransportError

logger = logging.getLogger(__name__)

OnLow = Literal["warn", "error"]


class BandwidthTooLow(TransportError):
    """A probe measured less than the floor; the message names peer, lanes and both figures."""


def check_bandwidth(
    result: ProbeResult, floor_gigabytes_per_second: float, on_low: OnLow = "warn"
) -> bool:
    """Returns whether ``result`` reaches the floor (1e9 bytes per second); if not, logs a warning.

    Args:
        result: what ``Transport.probe`` returned.
        floor_gigabytes_per_second: 0 accepts everything.
        on_low: ``"error"`` raises instead of warning.

    Raises:
        BandwidthTooLow: below the floor, and ``on_low`` is ``"error"``.
        ValueError: ``on_low`` is neither, or the floor is negative.
    """
    if on_low not in ("warn", "error"):
        raise ValueError(f"on_low is {on_low!r}; valid: 'warn', 'error'")
    if not floor_gigabytes_per_second >= 0:
        raise ValueError(f"floor_gigabytes_per_second is {floor_gigabytes_per_second}; give >= 0")
    if result.gigabytes_per_second >= floor_gigabytes_per_second:
        return True
    error = BandwidthTooLow(
        f"{result.gigabytes_per_second:.3g} GB/s with messages of {result.nbytes} bytes over "
        f"{result.lanes or 'unknown lanes'}, the floor is {floor_gigabytes_per_second:g} GB/s",
        transport=result.transport,
        peer=result.peer,
        hint="check which network UCX chose (UCX_TLS, UCX_NET_DEVICES), or lower the floor",
    )
    if on_low == "error":
        raise error
    logger.warning("%s", error)
    return False
