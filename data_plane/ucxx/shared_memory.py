"""Finds out whether a UCX worker still gets its peers' messages over shared memory.

All processes of a host write to a worker through one queue in shared memory. Each takes the next
slot, fills it, and marks it as full; the worker reads the slots in order. A process that is killed
or stopped between the first and the last of these leaves a slot that never fills, and nothing
behind it is ever read: the worker is deaf to every peer of its host, though connections to it
still open (UCX, ``uct_mm_ep_am_common_send`` in ``src/uct/sm/mm/base/mm_ep.c``). UCX does not
notice. Copies into such slots are what sending is, so of kills in the middle of large messages a
quarter end so.

The check sends a message to the worker through the same queue, from a worker beside it.
"""

from __future__ import annotations

import secrets
import time
from typing import Any, Final

import numpy as np
from ucxx._lib import libucxx
from ucxx._lib.arr import Array

DEAF_SECONDS: Final = 0.5
"""The message takes 0.3 ms where the queue is whole."""

_DEAF_TURNS: Final = 50
"""The worker has looked so often, too: the thread may have been kept from running."""

_OPTIONS: Final = {"TLS": "posix", "POSIX_ERROR_HANDLING": "y"}


class SharedMemoryCheck:
    """One check of ``worker``. Every method is for the owner thread.

    Args:
        worker: the ``UCXWorker`` to check. Its thread goes on to progress it.

    Attributes:
        tag: of the message, which the worker's thread reports by :meth:`arrive` when it comes.

    Raises:
        UCXError, RuntimeError: UCX could not make the worker beside it.
    """

    def __init__(self, worker: Any) -> None:
        self.tag = secrets.randbits(64)
        self._arrived = False
        self._turns = 0
        self._began = time.monotonic()
        feature = libucxx.Feature
        context = libucxx.UCXContext(_OPTIONS, (feature.TAG, feature.STREAM, feature.WAKEUP))
        self._caller = libucxx.UCXWorker(context)
        address = libucxx.UCXAddress.create_from_worker(worker)
        self._endpoint = libucxx.UCXEndpoint.create_from_worker_address(self._caller, address, True)
        self._memory = np.zeros(1, dtype=np.uint8)
        self._request = self._endpoint.tag_send(Array(self._memory), libucxx.UCXXTag(self.tag))

    @property
    def deaf(self) -> bool:
        """Returns whether the worker has had time to get the message and has not."""
        return (
            not self._arrived
            and self._turns >= _DEAF_TURNS
            and time.monotonic() - self._began >= DEAF_SECONDS
        )

    def look(self) -> bool:
        """One turn of the check; returns whether it is over."""
        self._turns += 1
        self._caller.progress()
        return self._arrived or self.deaf

    def arrive(self) -> None:
        """The message has come."""
        self._arrived = True

    def close(self) -> None:
        """Lets go of the worker beside it."""
        self._endpoint.close_blocking(0, 1)
        self._caller.progress()
