"""The leader among control planes: the others stand by, and refuse every call.

A control plane that runs alone leads at once. Of several on one machine, or on machines that share
a file system with locks, the one leads that holds a file's lock; in a Kubernetes cluster, the one
that holds a Lease (:mod:`control_plane.leadership.kubernetes_lease`). The one that takes over draws
a generation of its own (:mod:`control_plane.leadership.epochs`), so its epochs are above those of
the one before.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from distca.contract.timeouts import default_seconds
from distca.machine_errors import using

logger = logging.getLogger(__name__)

LOCK_LEASE_SECONDS = default_seconds("lock_lease_seconds")
"""How long the holder of a file's lock may show nothing before a standby takes over."""

BEAT_SECONDS = 1.0
"""The holder touches the file so often, and looks whether it is still its own."""


class Leadership(Protocol):
    """The right to lead. Used on one event loop, in the order of its methods."""

    async def acquire(self) -> None:
        """Waits until this control plane leads."""

    @property
    def is_held(self) -> bool:
        """Return whether nobody else can lead now. Looked at before every call that is answered."""

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
    """Leads who holds the lock of a file and shows that it is at work.

    The lock ends with its process, however that ends. A process that is stopped keeps it, so the
    leader touches the file every :data:`BEAT_SECONDS`; a standby that has seen no touch for
    ``lease_seconds``, by its own clock, puts a file of its own in the place of that one. The old
    leader finds that out before it answers anything again.

    Args:
        path: the file; it is made if it is not there.
        poll_seconds: how often to ask for the lock.
        lease_seconds: how long the leader may show nothing.
    """

    def __init__(
        self,
        path: Path,
        *,
        poll_seconds: float = 0.2,
        lease_seconds: float = LOCK_LEASE_SECONDS,
    ) -> None:
        self._path = path
        self._poll_seconds = poll_seconds
        self._lease_seconds = lease_seconds
        self._file: int | None = None
        self._sure_until = 0.0

    @property
    def is_held(self) -> bool:
        """Looks at the file if the last look may be from before a stop of this process."""
        return self._file is not None and (time.monotonic() < self._sure_until or self._beat())

    async def acquire(self) -> None:
        with using("leader_lock", self._path):
            await self._wait_for_lock()
        logger.info("leading: holding %s", self._path)

    async def _wait_for_lock(self) -> None:
        waiting = False
        leader = _Silence(self._path)
        while not self._take():
            if not waiting:
                waiting = True
                logger.info("standing by: another control plane holds %s", self._path)
            if leader.seconds(longest_step=5 * self._poll_seconds) > self._lease_seconds:
                self._replace(leader)
            await asyncio.sleep(self._poll_seconds)

    async def lost(self) -> str:
        """Touches the file; returns when another control plane has put its own there."""
        while self._beat():
            await asyncio.sleep(BEAT_SECONDS)
        return f"{self._path} was replaced: this process showed nothing for too long"

    async def release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _take(self) -> bool:
        """Asks for the lock of the file that is there now."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if _lock(file):
            self._file = file
            if self._beat():
                return True
            self._file = None
        os.close(file)
        return False

    def _replace(self, leader: _Silence) -> None:
        """Put a file in the place of the silent leader's; the process that locks it leads."""
        with self._gate() as is_open:
            if not is_open or not leader.is_still_silent:
                return
            logger.warning(
                "taking over: the control plane that holds %s has shown nothing for %g s",
                self._path,
                self._lease_seconds,
            )
            partial = self._path.with_name(f"{self._path.name}.{os.getpid()}.partial")
            partial.touch()
            partial.replace(self._path)

    def _beat(self) -> bool:
        """Touches the file; whether it is still the one that this process has locked."""
        with self._gate() as is_open:
            if self._file is None or not is_open or not _is_at(self._file, self._path):
                return False
            os.utime(self._file)
        self._sure_until = time.monotonic() + BEAT_SECONDS
        return True

    @contextmanager
    def _gate(self) -> Iterator[bool]:
        """Keeps a leader that goes on from touching the file while a standby replaces it; whether
        nobody else is at it. Only who takes over holds it for longer than a moment."""
        gate = os.open(f"{self._path}.takeover", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            yield _lock(gate)
        finally:
            os.close(gate)


class _Silence:
    """The time since a file was last touched, by this process's clock; time in which this process
    itself did not run does not count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._touched()
        self._seconds = 0.0
        self._looked_at = time.monotonic()

    def seconds(self, *, longest_step: float) -> float:
        """So far; longer than ``longest_step`` between two calls counts as that."""
        now = time.monotonic()
        self._seconds += min(now - self._looked_at, longest_step)
        self._looked_at = now
        if not self.is_still_silent:
            self._seen, self._seconds = self._touched(), 0.0
        return self._seconds

    @property
    def is_still_silent(self) -> bool:
        """Return whether the file is as it was when the silence began."""
        return self._touched() == self._seen

    def _touched(self) -> tuple[int, int]:
        # Opened, not only looked up: so a network file system asks its server.
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            status = os.fstat(file)
            return status.st_ino, status.st_mtime_ns
        finally:
            os.close(file)


def _is_at(file: int, path: Path) -> bool:
    """Return whether ``file`` is what lies at ``path``."""
    try:
        there = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return os.path.sameopenfile(file, there)
    finally:
        os.close(there)


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
