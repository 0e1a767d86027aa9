"""The steps of a run as JSON lines, written as they happen and followed by those who show them."""

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

    A step may be written again, when what was measured has arrived; the last line of it counts.
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
        steps = {record.step: record for record in _records(self._path, whole)}
        return tuple(steps[step] for step in sorted(steps))

    def forget_from(self, step: int) -> None:
        """Drops ``step`` and all after it: what a run did after its last checkpoint."""
        kept = [record for record in self.read() if record.step < step]
        write_whole(self._path, "".join(json.dumps(asdict(record)) + "\n" for record in kept))


def _records(path: Path, lines: bytes) -> list[TrainingStep]:
    """
    Raises:
        RunFolderError: a line is no step; names ``path``, where the lines are from.
    """
    try:
        return [TrainingStep.from_json(line) for line in lines.splitlines()]
    except RunFolderError as error:
        raise RunFolderError(
            f"{path}: {error}; a write was cut off or somebody has edited it: remove that line, "
            "and the run goes on without its figures"
        ) from error


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


class StepTail:
    """Follows a step log that another process writes, and may replace: what a resumed run forgets
    may come again.

    Args:
        path: of the log; it need not exist yet.
        from_end: whether to leave out what is there already.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._inode = 0
        self._position = 0
        self._newest: dict[int, TrainingStep] = {}
        if from_end:
            self.new_steps()

    def new_steps(self) -> list[TrainingStep]:
        """The lines that were completed since the last call; of a log that was replaced, those that
        it did not have before.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            inode = os.fstat(file.fileno()).st_ino
            known: dict[int, TrainingStep] = {}
            if inode != self._inode:
                self._inode, self._position = inode, 0
                known, self._newest = self._newest, {}
            file.seek(self._position)
            whole = file.read().rpartition(b"\n")[0]
        if not whole:
            return []
        self._position += len(whole) + 1
        records = _records(self._path, whole)
        self._newest.update((record.step, record) for record in records)
        return [record for record in records if known.get(record.step) != record]
