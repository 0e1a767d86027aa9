"""Checkpoints: written whole or not at all, the last two kept.

A disk that is full for a while costs no training: what cannot be saved now is saved at the next
checkpoint, and only a run that ends without having saved its last step fails.

A checkpoint holds weights, optimiser state and the number of steps done. Batches are a function of
(seed, step) and the learning rate of the step, so nothing else is needed to go on exactly.

The checkpoints of a folder are all of one training, so that the highest number is the last one
written. A run that begins at the first step sets those that it finds aside: beside them its own, of
lower numbers, would count as old.
"""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from core_attention.whole_file import write_whole
from distca.errors import DistcaError
from distca.run_folder import list_checkpoints

logger = logging.getLogger(__name__)

KEPT_CHECKPOINTS = 2
_EARLIER = "earlier"
"""Folder of what is set aside, beside the checkpoints."""

_UNREADABLE = (
    *(OSError, RuntimeError, EOFError, TypeError, ValueError),
    *(pickle.UnpicklingError, LookupError, AttributeError),
)
"""Errors of reading a checkpoint that was cut or changed."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of training after ``steps_done`` steps.

    Attributes:
        steps_done: steps that the weights have seen.
        identity: names data and model; a checkpoint of another identity is refused.
        model: state dict of the model.
        optimizer: state dict of the optimiser, by names of parameters.
    """

    steps_done: int
    identity: dict[str, Any]
    model: dict[str, Any]
    optimizer: dict[str, Any]

    def __post_init__(self) -> None:
        kinds = {"steps_done": int, "identity": dict, "model": dict, "optimizer": dict}
        for name, kind in kinds.items():
            if type(value := getattr(self, name)) is not kind:
                raise TypeError(f"{name} is {type(value).__name__}; it must be {kind.__name__}")


class KeptCheckpoints:
    """The checkpoints of a run, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._failure: DistcaError | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes ``checkpoint``; a failure is a warning, and kept for :meth:`require_last`."""
        self._failure = None
        path = self._folder / f"step-{checkpoint.steps_done:08d}.pt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # What writers that were killed have left would take up the disk forever.
            for partial in self._folder.glob("step-*.partial"):
                partial.unlink(missing_ok=True)
            write_whole(path, lambda file: torch.save(vars(checkpoint), file), durable=True)
            # Never the one that was just written, whatever numbers lie beside it.
            before = [old for old in list_checkpoints(self._folder) if old < path]
            for old in before[: -(KEPT_CHECKPOINTS - 1)]:
                old.unlink()
        # torch reports a failed write to a file object as RuntimeError.
        except (OSError, RuntimeError) as error:
            self._failure = DistcaError(f"{path} cannot be written: {_reason(error)}")
            logger.warning("%s; training goes on and saves at the next one", self._failure)
        else:
            logger.info("saved checkpoint %s", path)

    def require_last(self) -> None:
        """Checks at the end of the run that its last checkpoint was saved.

        Raises:
            DistcaError: it was not.
        """
        if self._failure is not None:
            raise DistcaError(
                f"the run ended without its last checkpoint: {self._failure}; make room and go on "
                "with --resume"
            ) from self._failure

    def set_aside(self) -> None:
        """Makes room for a training that begins at the first step: moves the newest checkpoint to a
        folder of its own below, and removes the others. What lies there goes, but for the one with
        the most steps: runs that are started again and again do not cost a long one.

        A process that dies on the way leaves either the newest checkpoint where it was or none to
        resume from.

        Raises:
            DistcaError: they cannot be moved or removed.
        """
        paths = list_checkpoints(self._folder)
        if not paths:
            return
        *older, newest = paths
        earlier = self._folder / _EARLIER
        try:
            for path in older:
                path.unlink()
            # A file, not the folder itself: that may be a mount or a link to a larger disk.
            earlier.mkdir(exist_ok=True)
            kept = newest.replace(earlier / newest.name)
            for path in list_checkpoints(earlier)[:-1]:
                if path != kept:
                    path.unlink()
        except OSError as error:
            raise DistcaError(
                f"{self._folder} holds checkpoints of an earlier run that cannot be set aside: "
                f"{error.strerror}; give --resume, or another run folder"
            ) from error
        logger.warning(
            "the last checkpoint of an earlier run is set aside as %s; to go on from it, move it "
            "back and give --resume",
            kept,
        )

    def load_newest(self, identity: dict[str, Any]) -> Checkpoint:
        """Reads the newest checkpoint.

        Raises:
            DistcaError: there is none, it cannot be read, or it belongs to another
                ``identity``.
        """
        paths = list_checkpoints(self._folder)
        if not paths:
            raise DistcaError(
                f"{self._folder} holds no checkpoint to resume from; give --resume-or-start to "
                "begin at the first step"
            )
        path = paths[-1]
        try:
            fields = torch.load(path, map_location="cpu", weights_only=True)
            checkpoint = Checkpoint(**fields)
        except _UNREADABLE as error:
            raise DistcaError(
                f"{path} cannot be read ({error}); remove it to resume from an older one"
            ) from error
        then = checkpoint.identity
        if differing := sorted(name for name in identity if then.get(name) != identity[name]):
            shown = "; ".join(f"{n}: {then.get(n)!r} then, {identity[n]!r} now" for n in differing)
            raise DistcaError(
                f"{path} belongs to another run ({shown}); give the options that it began with"
            )
        return checkpoint


def _reason(error: BaseException) -> str:
    """The operating system's own words, wherever in the chain they are."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).splitlines()[0]
