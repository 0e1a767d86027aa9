"""A process beside the control plane; it ends when the control plane does, however that ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

POLL_SECONDS = 0.05
"""How often a wait for an answer looks whether it is wanted still."""


class Child:
    """A process that does what it is asked for, one request at a time; started on first use. For
    one thread at a time.

    Args:
        environ: variables that it has besides, before it imports what it is asked for.
        niceness: how much longer it may take where the machine has other things to do.
    """

    def __init__(self, environ: Mapping[str, str], niceness: int = 0) -> None:
        self._settings = dict(environ), niceness
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None

    def start(self) -> Connection:
        """Starts the process already, so that the first request need not wait for it.

        Raises:
            OSError: no process can be started.
        """
        if self._connection is None:
            ours, theirs = multiprocessing.Pipe()
            context = multiprocessing.get_context("spawn")
            self._process = context.Process(
                target=_serve, args=(theirs, *self._settings), daemon=True
            )
            with theirs:
                self._process.start()
            self._connection = ours
        return self._connection

    def ask(self, work: Callable[..., Any], *args: Any, is_wanted: Callable[[], bool]) -> Any:
        """The answer of ``work(*args)`` in the process, or what that raises; None once it is not
        wanted any more, which ends the process.

        Raises:
            OSError: there is no process, or it has ended.
        """
        connection = self.start()
        try:
            connection.send((work, args))
            while not connection.poll(POLL_SECONDS):
                if not is_wanted():
                    self.close()
                    return None
            answer = connection.recv()
        except (EOFError, OSError):
            raise ChildProcessError(self.close()) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> str:
        """Ends the process, unless it has ended; returns how."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is None or connection is None:
            return "was not started"
        connection.close()
        process.kill()
        process.join()
        code = process.exitcode or 0
        process.close()
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def _serve(connection: Connection, environ: Mapping[str, str], niceness: int) -> None:
    """Answers requests until the other end of the connection is closed."""
    os.environ.update(environ)
    # Ctrl-C is for the control plane.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(niceness)
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    with contextlib.suppress(EOFError):
        while True:
            work, args = connection.recv()
            try:
                answer = work(*args)
            except Exception as error:
                answer = error
            connection.send(answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
