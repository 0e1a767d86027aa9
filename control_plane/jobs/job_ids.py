"""Ids of jobs. Of two jobs of one name, the id says which was opened later.

The one opened later may have the name: names are given to one job at a time, and after a start
only when all jobs from before have had the time to come back. So the earlier one had ended, or has
stayed away for too long.
"""

from __future__ import annotations

import secrets

_NUMBER_DIGITS = 14
_RANDOM_BYTES = 2
_N_TAILS = 256**_RANDOM_BYTES


def new_job_id(name: str, number: int) -> str:
    """The id of a job that is opened now.

    Args:
        name: of the job.
        number: higher than those of all jobs of the name before; below 2**56.
    """
    # Random, since control planes that keep no state number by their clocks.
    return f"{name}-{number:0{_NUMBER_DIGITS}x}{secrets.token_hex(_RANDOM_BYTES)}"


def successor_of(job_id: str) -> str | None:
    """The id of a job that follows the job ``job_id`` under its name: later than that one, and
    earlier than every job of the name that was opened after it. None if there is no more."""
    prefix, tail = job_id[: -2 * _RANDOM_BYTES], int(job_id[-2 * _RANDOM_BYTES :], 16)
    n_left = _N_TAILS - 1 - tail
    if not n_left:
        return None
    return f"{prefix}{tail + 1 + secrets.randbelow(n_left):0{2 * _RANDOM_BYTES}x}"


def name_of(job_id: str) -> str:
    """The name of the job that has the id; any text if it is no job's id."""
    return job_id.rpartition("-")[0]


def is_later(job_id: str, other: str) -> bool:
    """Whether a job was opened later than another one of its name. Both are ids of real jobs."""
    return int(job_id.rpartition("-")[2], 16) > int(other.rpartition("-")[2], 16)
