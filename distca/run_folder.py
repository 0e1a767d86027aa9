"""The folder of a run: where its checkpoints, step log, record, report and process logs lie."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from distca.errors import RunFolderError

_MARK = "steps.jsonl"
_CHECKPOINTS = "step-????????.pt"


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
        return self.root / _MARK

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
        return max(self.checkpoints.glob(_CHECKPOINTS), default=None)

    def open(self) -> None:
        """Makes the folder if need be, and drops the record and report of an earlier part of the
        run: what they say is not what this part will leave.

        Raises:
            RunFolderError: the folder cannot be made.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for path in (self.record, self.report):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise RunFolderError(f"{self.root} cannot be used: {error.strerror}") from error

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Makes the folder ready for a run.

        Raises:
            RunFolderError: a run is there already and is neither resumed nor overwritten, or there
                is none to resume, or the folder holds something else or cannot be made.
        """
        if resume:
            if not self.checkpoints.is_dir():
                raise RunFolderError(
                    f"{self.root} holds no checkpoint to resume from; leave --resume out, or name "
                    "the run to resume"
                )
            self.open()
            return
        try:
            occupied = self.root.is_dir() and any(self.root.iterdir())
            if occupied and not overwrite:
                raise RunFolderError(
                    f"{self.root} holds a run already: choose another name, go on with it by "
                    "--resume, or give --overwrite"
                )
            if occupied and not (self.logs.is_dir() or self.step_log.exists()):
                raise RunFolderError(f"{self.root} holds no run, so it is not overwritten")
            if occupied:
                shutil.rmtree(self.root)
        except OSError as error:
            raise RunFolderError(f"{self.root} cannot be used: {error.strerror}") from error
        self.open()
