"""One supervised process: its command, log file, and how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

TAIL_LINES = 12
"""Last log lines that a report of a failure shows."""

_TAIL_BYTES = 16 * 1024


class LocalProcess:
    """A distca command running in a process of its own, in a session (and group) of its own.

    Args:
        name: for people, for example ``"attention node 1"``.
        arguments: of the distca command.
        log: file that its output is appended to.
        environ: its whole environment.
        shows: its standard output goes where this process's goes.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        environ: Mapping[str, str],
        *,
        shows: bool = False,
    ) -> None:
        self.name = name
        self.log = log
        self._arguments = arguments
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=None if shows else output,
                stderr=output,
                env=dict(environ),
                start_new_session=True,
            )

    def command(self) -> list[str]:
        """The distca command, tied to this process's life."""
        tied = [sys.executable, "-m", "distca.child", str(os.getpid())]
        return [*tied, *self._arguments]

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that killed it."""
        return self._popen.poll()

    def interrupt(self) -> None:
        """Asks it to finish what it is at and exit."""
        self._send(signal.SIGINT)

    def terminate(self) -> None:
        """Asks it to exit."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and whatever it started, at once, and waits until it is gone."""
        # Its group is its own (start_new_session) and outlives it while a child of it runs.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()

    def describe_end(self) -> str:
        """Describes its end."""
        code = self.exit_code
        if code is None:
            return "still runs"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name} (exit code {code})"
        return f"exited with code {code}"

    def log_tail(self) -> list[str]:
        """Its last log lines."""
        with self.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-TAIL_LINES:]

    def _send(self, number: signal.Signals) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(number)
