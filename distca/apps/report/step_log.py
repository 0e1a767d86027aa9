"""The steps of a run as JSON lines, written as they happen."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path

from core_attention.whole_file import write_whole
from distca.apps.report.record import TrainingStep
from distca.errors import DistcaError

logger = logging.getLogger(__name__)


class StepLog:
    """One line a step, readable while the run goes on.

    Args:
        path: of the file; made when the first step is written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Lines that could not be written, on a full disk.
        self._unwritten = b""

    def append(self, record: TrainingStep) -> None:
        """Adds ``record`` as one line; one that cannot be written is kept, and goes with the
        next."""
        self._unwritten += _line(record)
        try:
            with self._path.open("ab", buffering=0) as file:
                written = file.write(self._unwritten)
        except OSError as error:
            logger.warning("%s: %s; steps are kept until it can be written", self._path, error)
        else:
            self._unwritten = self._unwritten[written:]

    def read(self) -> tuple[TrainingStep, ...]:
        """All steps, in order; a last line that is not yet whole is left out.

        Raises:
            DistcaError: a line is no step.
        """
        written = self._path.read_bytes() if self._path.exists() else b""
        whole = (written + self._unwritten).rpartition(b"\n")[0]
        try:
            return tuple(TrainingStep(**json.loads(line)) for line in whole.splitlines())
        except (RecursionError, TypeError, ValueError) as error:
            raise DistcaError(
                f"{self._path} holds a line that is no step: {error}; remove it to go on"
            ) from error

    def forget_from(self, step: int) -> None:
        """Drops ``step`` and all after it: what a run did after its last checkpoint."""
        kept = [_line(record) for record in self.read() if record.step < step]
        write_whole(self._path, b"".join(kept))


def _line(record: TrainingStep) -> bytes:
    return json.dumps(asdict(record)).encode() + b"\n"
