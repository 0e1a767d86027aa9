"""Processes beside the control plane: each ends when the control plane does, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO

LAST_WORDS_CHARACTERS = 300
"""How much of the last line that a process wrote to stderr goes to the log."""


def start_child(
    module: str,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    stderr: int | IO[bytes],
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Starts ``python -m module``, which calls :func:`end_with_parent`.

    It is in a session of its own: Ctrl-C is for the control plane.

    Raises:
        OSError: no process can be started.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env={**os.environ, **environ},
        pass_fds=pass_fds,
        start_new_session=True,
    )


def end_with_parent() -> None:
    """Ends this process as soon as the one that started it is gone, which closes its stdin."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


def how_it_ended(process: subprocess.Popen[bytes], stderr: bytes = b"") -> str:
    """Describe the end: exit code or signal, and the last line of ``stderr``."""
    code = process.wait()
    how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    lines = stderr.decode(errors="replace").strip().splitlines()
    return f"{how}: {lines[-1][:LAST_WORDS_CHARACTERS]}" if lines else how
