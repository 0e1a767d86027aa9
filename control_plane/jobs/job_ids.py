"""Ids of jobs. Of two jobs of one name, the id says which was opened later."""

from __future__ import annotations

import secrets

_NUMBER_DIGITS = 14
_RANDOM_BYTES = 2


def new_job_id(name: str, number: int) -> str:
    """The id of a job that is opened now.

    Args:
        name: of the job.
        number: higher than those of all jobs of the name before; below 2**56.
    """
    # Random, since control planes that keep no state number by their clocks.
    return f"{name}-{number:0{_NUMBER_DIGITS}x}{secrets.token_hex(_RANDOM_BYTES)}"


def name_of(job_id: str) -> str:
    """The name of the job that has the id; any text if it is no job's id."""
    return job_id.rpartition("-")[0]


def is_later(job_id: str, other: str) -> bool:
    """Return whether a job was opened later than another one of its name. Both are ids of real
    jobs."""
    return int(job_id.rpartition("-")[2], 16) > int(other.rpartition("-")[2], 16)
