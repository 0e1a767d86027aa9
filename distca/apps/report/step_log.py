"""The steps of a run as JSON lines, written as they happen."""

from __future__ import annotations

import errno
import json
import logging
import os
from dataclasses import asdict
from pathlib import Path

from core_attention.whole_file import write_whole
from distca.apps.report.record import TrainingStep
from distca.errors import RunFolderError

logger = logging.getLogger(__name__)


class StepLog:
    """One line a step, readable while the run goes on.

    Lines that cannot be written, on a full disk, are kept in memory and written with the next.

    Args:
        path: of the file; made when the first step is written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten = ""
        self._fails = False

    def append(self, record: TrainingStep) -> None:
        """Adds ``record`` as one line; that it cannot be written is a warning, once."""
        self._unwritten += json.dumps(asdict(record)) + "\n"
        try:
            _append_whole(self._path, self._unwritten.encode())
        except OSError as error:
            if not self._fails:
                logger.warning(
                    "%s cannot be written: %s; steps are kept in memory until it can",
                    self._path,
                    error.strerror,
                )
            self._fails = True
        else:
            self._unwritten = ""
            self._fails = False

    def read(self) -> tuple[TrainingStep, ...]:
        """All steps, in order; a last line that is not yet whole is left out."""
        written = self._path.read_bytes() if self._path.exists() else b""
        whole = (written + self._unwritten.encode()).rpartition(b"\n")[0]
        try:
            return tuple(map(TrainingStep.from_json, whole.splitlines()))
        except RunFolderError as error:
            raise RunFolderError(
                f"{self._path}: {error}; a write was cut off or somebody has edited it: remove "
                "that line, and the run goes on without its figures"
            ) from error

    def forget_from(self, step: int) -> None:
        """Drops ``step`` and all after it: what a run did after its last checkpoint."""
        kept = [record for record in self.read() if record.step < step]
        write_whole(self._path, "".join(json.dumps(asdict(record)) + "\n" for record in kept))


def _append_whole(path: Path, lines: bytes) -> None:
    """Appends all of ``lines`` or nothing.

    Raises:
        OSError: they cannot be written.
    """
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            if file.write(lines) != len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(end)
            raise
