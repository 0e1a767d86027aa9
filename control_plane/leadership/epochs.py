"""Epochs: numbers of plans that never go back, not even when the control plane starts again.

An epoch is ``generation * 2**20 + n``. The generation belongs to one run of the control plane and
is higher than those of all runs before; n counts the recoveries of a job.
"""

from __future__ import annotations

import fcntl
import logging
import time
from pathlib import Path
from typing import IO

from core_attention.whole_file import write_whole
from distca.machine_errors import using

logger = logging.getLogger(__name__)

GENERATION_BITS = 20
"""The shift of the generation in an epoch: a job may recover a million times in one run."""

_FILE = "generation"


def first_epoch(generation: int) -> int:
    """The epoch of the first plans that a run of the control plane makes."""
    return generation << GENERATION_BITS


def next_generation(state_dir: Path | None) -> int:
    """The generation of a run that begins now: higher than any that was given with this
    ``state_dir``, and no lower than the time in seconds, so that it is higher than one given
    without.

    Two processes that ask at the same time get different ones.
    """
    now = int(time.time())
    if state_dir is None:
        return now
    path = state_dir / _FILE
    with using("state_dir", state_dir), _lock_in(state_dir) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        generation = max(_last_generation(path) + 1, now)
        write_whole(path, f"{generation}\n", durable=True)
    logger.info("generation %d, kept in %s", generation, path)
    return generation


def _lock_in(state_dir: Path) -> IO[str]:
    state_dir.mkdir(parents=True, exist_ok=True)
    return (state_dir / f"{_FILE}.lock").open("w")


def _last_generation(path: Path) -> int:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return 0
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"{path} holds {text[:32]!r}; it must be one whole number: restore it, or delete it if "
            "the clock of this machine is right"
        ) from None
