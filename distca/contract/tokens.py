"""A job's tokens: the proof that a process is a given rank of a given job.

The control plane gives each rank a token of its own when the rank opens the job. The rank shows it
with every call about the job and with the first message of every connection to a server. A server
checks tokens with the job's key, which it has from the control plane; a holder of a token alone
can neither make another rank's nor another job's.

A token is the rank (4 bytes, big-endian) and HMAC-SHA256(job key, label + rank).
"""

from __future__ import annotations

import hmac
import struct

JOB_TOKEN_KEY = "distca-job-token-bin"
"""Call metadata that carries a rank's token."""

KEY_BYTES = 32
TOKEN_BYTES = 36

_LABEL = b"distca rank token"
_RANK = struct.Struct("!I")


def rank_token(job_key: bytes, rank: int) -> bytes:
    """The token of ``rank`` in the job whose key is ``job_key``."""
    number = _RANK.pack(rank)
    return number + hmac.digest(job_key, _LABEL + number, "sha256")


def rank_of_token(job_key: bytes, token: bytes) -> int | None:
    """The rank that ``token`` belongs to; None if it is no token of the job whose key is
    ``job_key``. Takes the same time for every token of the right length."""
    if len(job_key) != KEY_BYTES or len(token) != TOKEN_BYTES:
        return None
    rank: int = _RANK.unpack_from(token)[0]
    return rank if hmac.compare_digest(rank_token(job_key, rank), token) else None
