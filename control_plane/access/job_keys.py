"""The keys of jobs: derived, never stored, so that they outlive the process.

A job's key is HMAC-SHA256(secret, label + owner + job id). A control plane that starts again with
the same secret therefore recognises the tokens of the jobs that its predecessor opened, without
having kept anything: a rank that comes back with job id and token has proved that it was given the
token, and that it is the same owner.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from pathlib import Path

from control_plane.errors import RefusedError
from core_attention.whole_file import sync_folder, write_whole
from distca.contract.rpc_errors import Reason
from distca.contract.tokens import rank_of_token
from distca.machine_errors import check_secret, using

MIN_SECRET_BYTES = 32
_LABEL = b"distca job key"


class JobKeys:
    """Derives jobs' keys from one secret.

    Args:
        secret: :data:`MIN_SECRET_BYTES` or more; None makes a random one, good for as long as the
            process lives.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secrets.token_bytes(MIN_SECRET_BYTES) if secret is None else secret

    @classmethod
    def from_file(cls, path: Path) -> JobKeys:
        """Keys from the secret in ``path``, whose bytes are taken as they are.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is too short, or everybody may read it.
        """
        check_secret(path)
        secret = path.read_bytes()
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(
                f"{path} holds {len(secret)} bytes; a token secret has {MIN_SECRET_BYTES} or more: "
                f"head -c {MIN_SECRET_BYTES} /dev/urandom > {path}"
            )
        return cls(secret)

    def key_of(self, job_id: str, owner: str) -> bytes:
        """The key of job ``job_id``, which the identity ``owner`` has opened."""
        return self._derive(_LABEL, owner.encode(), job_id.encode())

    def _derive(self, *parts: bytes) -> bytes:
        # The length before each part: no two different lists of parts give the same bytes.
        message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._secret, message, "sha256")

    def proved(self, job_id: str, *, owner: str, rank: int, token: bytes | None) -> bytes:
        """The key of a job that this process may not know, for a rank that comes back
        to it after a restart and shows its token.
        """
        if token is None:
            raise RefusedError(
                Reason.MISSING_TOKEN, f"rank {rank} comes back to job {job_id} without its token"
            )
        key = self.key_of(job_id, owner)
        if rank_of_token(key, token) != rank:
            opened = f", opened by {owner!r}" if owner else ""
            raise RefusedError(
                Reason.WRONG_TOKEN,
                f"the token that came is not that of rank {rank} of job {job_id}{opened}; without "
                "a token secret none outlives the control plane",
            )
        return key


def job_keys(secret_file: Path | None, state_dir: Path | None) -> JobKeys:
    """Keys from the secret in ``secret_file``; else from one that is kept in ``state_dir``, and
    made there the first time; else from a random one.
    """
    if secret_file is not None:
        with using("token_secret", secret_file):
            return JobKeys.from_file(secret_file)
    if state_dir is None:
        return JobKeys()
    path = state_dir / "token-secret"
    with using("state_dir", state_dir):
        state_dir.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _make_secret(path)
        return JobKeys.from_file(path)


def _make_secret(path: Path) -> None:
    """Writes a secret that only this user can read, unless another process does so first."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        # Else a crash may leave the name without the bytes, and no control plane starts any more.
        write_whole(partial, secrets.token_bytes(MIN_SECRET_BYTES), mode=0o600, durable=True)
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
        sync_folder(path.parent)
    except OSError as error:
        # A failed write names no file.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)
