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
        self._unwritten = b""

    def append(self, record: TrainingStep) -> None:
        """Adds ``record`` as one line; that it cannot be written is a warning, once."""
        before = self._unwritten
        self._unwritten += _line(record)
        try:
            _append_whole(self._path, self._unwritten)
        except OSError as error:
            if not before:
                why = error.strerror
                logger.warning("%s: %s; steps are kept until it can be written", self._path, why)
        else:
            self._unwritten = b""

    def read(self) -> tuple[TrainingStep, ...]:
        """All steps, in order; a last line that is not yet whole is left out.

        Raises:
            RunFolderError: a line is no step.
        """
        written = self._path.read_bytes() if self._path.exists() else b""
        whole = (written + self._unwritten).rpartition(b"\n")[0]
        try:
            return tuple(TrainingStep(**json.loads(line)) for line in whole.splitlines())
        except (RecursionError, TypeError, ValueError) as error:
            raise RunFolderError(
                f"{self._path} holds a line that is no step: {error}; remove it to go on"
            ) from error

    def forget_from(self, step: int) -> None:
        """Drops ``step`` and all after it: what a run did after its last checkpoint."""
        kept = [_line(record) for record in self.read() if record.step < step]
        write_whole(self._path, b"".join(kept))


def _line(record: TrainingStep) -> bytes:
    return json.dumps(asdict(record)).encode() + b"\n"


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
