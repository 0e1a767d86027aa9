"""The steps of a run as JSON lines, written as they happen and followed by whoever shows them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from distca.report.record import StepRecord


class StepLog:
    """One line a step, readable while the run goes on.

    A step may be written again, when what was measured has arrived; the last line of it counts.

    Args:
        path: of the file; made when the first step is written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, record: StepRecord) -> None:
        """Adds ``record`` as one line."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")

    def read(self) -> tuple[StepRecord, ...]:
        """All steps, in order; a last line that is not yet whole is left out."""
        if not self._path.exists():
            return ()
        steps: dict[int, StepRecord] = {}
        for line in self._path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                record = StepRecord(**json.loads(line))
                steps[record.step] = record
        return tuple(steps[step] for step in sorted(steps))

    def forget_from(self, step: int) -> None:
        """Drops ``step`` and all after it: what a run did after its last checkpoint."""
        kept = [record for record in self.read() if record.step < step]
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text("".join(json.dumps(asdict(record)) + "\n" for record in kept))
        partial.replace(self._path)


class StepTail:
    """Follows a step log that another process writes.

    Args:
        path: of the log; it need not exist yet.
        from_end: whether to leave out what is there already.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._position = path.stat().st_size if from_end and path.exists() else 0

    def new_steps(self) -> list[StepRecord]:
        """The lines that were completed since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            whole = file.read().rpartition(b"\n")[0]
        if not whole:
            return []
        self._position += len(whole) + 1
        return [StepRecord(**json.loads(line)) for line in whole.splitlines()]
