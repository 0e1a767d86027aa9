"""The folder of a run: where its checkpoints, step log, record, report and process logs lie."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from distca.errors import DistcaError

logger = logging.getLogger(__name__)


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder``, oldest first."""
    return sorted(folder.glob("step-????????.pt"))


@dataclass(frozen=True)
class RunFolder:
    """Paths inside a run's folder; its name is the run's name."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def step_log(self) -> Path:
        return self.root / "steps.jsonl"

    @property
    def record(self) -> Path:
        return self.root / "run.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def figures(self) -> Path:
        return self.root / "figures"

    def newest_checkpoint(self) -> Path | None:
        """The newest checkpoint that is complete."""
        return max(list_checkpoints(self.checkpoints), default=None)

    def open(self) -> None:
        """Makes the folder if need be, and drops the record and report of an earlier part of the
        run: what they say is not what this part will leave.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for path in (self.record, self.report):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise DistcaError(f"{self.root} cannot be used: {error.strerror}") from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other runs of ``distca local`` on this machine out of this folder, where the
        file system knows locks.
        """
        lock = self.root.with_name(f".{self.name}.lock")
        with ExitStack() as stack:
            try:
                lock.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(lock.open("w"))
                while not _locked(file, lock):
                    file = stack.enter_context(lock.open("w"))
            except BlockingIOError:
                raise DistcaError(
                    f"{self.root} is in use by a run that has not ended; choose another name, or "
                    "wait for its end"
                ) from None
            except OSError as error:
                raise DistcaError(f"{self.root} cannot be used: {error.strerror}") from error
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)

    def prepare(self, *, resume: bool) -> None:
        """Makes the folder ready for a run."""
        try:
            if resume and self.newest_checkpoint() is None:
                raise DistcaError(
                    f"{self.root} holds no checkpoint to resume from; leave --resume out, or name "
                    "the run to resume"
                )
            if not resume and self.root.is_dir() and any(self.root.iterdir()):
                raise DistcaError(
                    f"{self.root} is not empty: choose another name, or go on with it by --resume"
                )
        except OSError as error:
            raise DistcaError(f"{self.root} cannot be used: {error.strerror}") from error
        self.open()


def _locked(file: IO[str], path: Path) -> bool:
    """Locks ``file``, and says whether it is still the one at ``path``: a former holder of the lock
    may have removed it.

    Raises:
        BlockingIOError: another process has the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        logger.warning("%s cannot be locked: %s", path, error.strerror)
        return True
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
