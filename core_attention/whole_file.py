"""Files that others read while they are written: they see the former content or the new one."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_whole(
    path: Path,
    content: str | bytes | Callable[[BinaryIO], object],
    *,
    mode: int | None = None,
    durable: bool = False,
) -> None:
    """Puts ``content`` at ``path``, whole or not at all; of several writers the last one counts.

    Args:
        path: in a folder that exists. What a symbolic link leads to is written, and the link
            stays; a device or pipe is written to piece by piece.
        content: text is written as UTF-8; a callable writes it itself, to the file that it is
            given.
        mode: permissions, which hold from the start; None: what the process's umask leaves.
        durable: also after a power failure.

    Raises:
        OSError: it cannot be written. Then, and if ``content`` raises, what was there before is
            untouched.
    """
    if _is_special(path):
        with path.open("wb") as file:
            _write(file, content)
        return
    path = _target(path)
    partial = _partial(path)
    try:
        with open(
            partial, "wb", opener=lambda name, flags: os.open(name, flags, mode or 0o666)
        ) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            _write(file, content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.filename == str(partial):
            # The file that was asked for, and not the one tried.
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    if durable:
        sync_folder(path.parent)


def _write(file: BinaryIO, content: str | bytes | Callable[[BinaryIO], object]) -> None:
    if callable(content):
        content(file)
    else:
        file.write(content.encode() if isinstance(content, str) else content)


def check_can_write_all(*paths: Path | None) -> None:
    """:func:`check_can_write` of those that are asked for."""
    for path in paths:
        if path is not None:
            check_can_write(path)


def check_can_write(path: Path) -> None:
    """Checks a path for work that takes long and is written at its end. Makes the folder of
    ``path``.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if _is_special(path):
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    path = _target(path)
    partial = _partial(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    except OSError as error:
        # The file that was asked for, and not the one tried.
        raise OSError(error.errno, error.strerror, str(path)) from None
    partial.unlink()


def sync_folder(folder: Path) -> None:
    """Makes the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_special(path: Path) -> bool:
    """Returns whether it is, or leads to, neither a file nor a folder, and so must not be replaced;
    links such as /dev/stdout lead to what has no name."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _target(path: Path) -> Path:
    """The target of a symbolic link, else ``path``."""
    if not path.is_symlink():
        return path
    try:
        return path.resolve()
    except RuntimeError as error:  # of Python before 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error


def _partial(path: Path) -> Path:
    """The file that this thread writes to before the whole is put at ``path``."""
    return path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
