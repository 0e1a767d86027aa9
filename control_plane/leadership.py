"""Which of several control planes leads: the others stand by, and refuse every call.

A control plane that runs alone leads at once. Of several on one machine, or on machines that share
a file system with locks, the one leads that holds a file's lock; in a Kubernetes cluster, the one
that holds a Lease (:mod:`control_plane.kubernetes_lease`). Whoever takes over draws a generation of
its own (:mod:`control_plane.epochs`), so its epochs are above those of the one before.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(__name__)


class LeadershipLostError(Exception):
    """Another control plane may lead now; this one must stop at once."""


class Leadership(Protocol):
    """The right to lead. Used on one event loop, in the order of its methods."""

    async def acquire(self) -> None:
        """Waits until this control plane leads.

        Raises:
            OSError: the lock cannot be asked for.
        """

    @property
    def is_held(self) -> bool:
        """Whether nobody else can lead now. Looked at before every call that is answered."""

    async def lost(self) -> str:
        """Waits until this control plane leads no more; why."""

    async def release(self) -> None:
        """Lets another one take over."""


class Alone:
    """There is no other control plane."""

    is_held = True

    async def acquire(self) -> None:
        """Returns at once."""

    async def lost(self) -> str:
        """Never returns."""
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def release(self) -> None:
        """Does nothing."""


class FileLock:
    """Leads who holds the lock of a file. The lock ends with its process, however that ends; a
    process that is stopped holds it, and nobody takes over.

    Args:
        path: the file; it is made if it is not there.
        poll_seconds: how often to ask for the lock.
    """

    def __init__(self, path: Path, *, poll_seconds: float = 0.2) -> None:
        self._path = path
        self._poll_seconds = poll_seconds
        self._file: int | None = None

    @property
    def is_held(self) -> bool:
        return self._file is not None

    async def acquire(self) -> None:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            waiting = False
            while not _lock(file):
                if not waiting:
                    waiting = True
                    logger.info("standing by: another control plane holds %s", self._path)
                await asyncio.sleep(self._poll_seconds)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        logger.info("leading: holding %s", self._path)

    async def lost(self) -> str:
        """Never returns: the lock is held for as long as the process wants it."""
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
