"""Refusals of the machine, by the setting that asked, with advice."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

_SPARE_FILES: Final = 16
"""Files that a library's listener opens besides its socket."""

_MORE_FILES: Final = "raise the limit of open files (ulimit -n)"

_ADVICE: Final = {
    errno.EACCES: "choose a port above 1023, or 0 for any free one",
    errno.EADDRINUSE: "choose another port, or 0 for any free one",
    errno.EADDRNOTAVAIL: "give an address of this machine",
    errno.EMFILE: _MORE_FILES,
    errno.ENFILE: _MORE_FILES,
}


class ListenError(OSError):
    """Nothing can listen at an address.

    Attributes:
        field: the setting that gives it.
        errno: what the kernel says; 0 if a listener could be had there.
    """

    def __init__(self, field: str, host: str, port: int, cause: BaseException) -> None:
        self.field = field
        number, why = refusal(host, port, cause)
        super().__init__(f"{field} {host}:{port} cannot be listened on: {why}")
        self.errno = number


def refusal(host: str, port: int, cause: BaseException) -> tuple[int, str]:
    """The kernel's number for why ``cause`` was raised by a listener, and what to say of it.
    Libraries say only that it failed; then the kernel is asked again."""
    found = cause if isinstance(cause, OSError) and cause.errno else _asked(host, port)
    if found is None or not found.errno:
        return 0, f"{type(cause).__name__}: {cause}"
    advice = _ADVICE.get(found.errno)
    return found.errno, f"{found.strerror}" + (f"; {advice}" if advice else "")


def _asked(host: str, port: int) -> OSError | None:
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with ExitStack() as stack:
            trial = stack.enter_context(socket.socket(family))
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
            trial.listen()
            for _ in range(_SPARE_FILES):
                stack.enter_context(socket.socket())
    except OSError as error:
        return error
    except UnicodeError as error:
        return socket.gaierror(socket.EAI_NONAME, f"not the name of a host: {error}")
    return None


_PATH_ADVICE: Final = {
    errno.EACCES: "give one that this user may read and write",
    errno.EDQUOT: "make room there",
    errno.EEXIST: "give a folder: a file is there",
    errno.ENOSPC: "make room there",
    errno.ENOTDIR: "give a folder: a file is there",
    errno.EPERM: "give one that this user may read and write",
    errno.EROFS: "give one that can be written",
}


class PathError(OSError):
    """A file or folder of a setting cannot be used.

    Attributes:
        field: the setting.
        errno: what the kernel says.
    """

    def __init__(self, field: str, path: Path, cause: OSError) -> None:
        self.field = field
        advice = _PATH_ADVICE.get(cause.errno or 0)
        at = "" if cause.filename in (None, str(path)) else f" ({cause.filename})"
        super().__init__(
            f"{field} {path} cannot be used: {cause.strerror or cause}{at}"
            + (f"; {advice}" if advice else "")
        )
        self.errno = cause.errno


@contextmanager
def using(field: str, path: Path) -> Iterator[None]:
    """Errors about files in the block are about ``path``, which the setting ``field`` gives.

    Raises:
        PathError: in the place of any other OSError.
    """
    try:
        yield
    except PathError:
        raise
    except OSError as error:
        raise PathError(field, path, error) from error


def check_secret(path: Path) -> None:
    """Refuses a file that others than its owner and its group may use."""
    mode = path.stat().st_mode & 0o777
    if mode & 0o007:
        raise ValueError(
            f"{path} has mode {mode:o}: everybody on this machine may use the secret; chmod 600 "
            "it, and make another if somebody has"
        )
