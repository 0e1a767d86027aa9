"""Processes of a job's ranks on this host, each with a log of its own, and a time limit."""

from __future__ import annotations

import faulthandler
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from distca.child import die_with_parent

TAIL_LINES = 12
"""Last lines of a rank's output that a report shows."""

DUMP_SECONDS = 5.0
"""How long before its limit a rank writes where its threads stand. Not long: it does so without
stopping them, which may crash it."""

LAST_WORDS_SECONDS = 10.0
"""What ranks say of the end of another is worth that long."""

_DUMP_VARIABLE = "DISTCA_DUMP_AT_SECONDS"
"""When, as ``time.time`` has it."""

_FIRST_PORT, _PORTS = 20000, 10000
"""Below those that the kernel gives to connections."""


def _free_port() -> int:
    """Drawn, so that programs that run side by side do not choose the same."""
    while True:
        port = _FIRST_PORT + secrets.randbelow(_PORTS)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def begin_rank() -> None:
    """Ties a rank's process to the one that started it, and has it write its stacks in time."""
    die_with_parent(os.getppid())
    seconds = float(os.environ[_DUMP_VARIABLE]) - time.time()
    faulthandler.dump_traceback_later(max(seconds, 1.0), exit=False)


class RankGroup:
    """Ranks with the environment that torchrun gives; started at once.

    Args:
        command: of every rank.
        n_ranks: processes.
        folder: of the outputs, ``rank-0.log`` and up; made if it is not there.
        limit_seconds: what still runs then is killed.
        environ: of all, before what torchrun sets.
        cwd: where they run; None: here.
    """

    def __init__(
        self,
        command: Sequence[str],
        n_ranks: int,
        folder: Path,
        *,
        limit_seconds: float,
        environ: Mapping[str, str] = os.environ,
        cwd: Path | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = [folder / f"rank-{rank}.log" for rank in range(n_ranks)]
        self.began = time.monotonic()
        self.seconds = 0.0
        self._deadline = self.began + limit_seconds
        self._popens = []
        common = {
            "OMP_NUM_THREADS": "1",
            **{n: v for n, v in environ.items() if not n.startswith("TORCHELASTIC_")},
            "PYTHONUNBUFFERED": "1",
            "WORLD_SIZE": str(n_ranks),
            "LOCAL_WORLD_SIZE": str(n_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            _DUMP_VARIABLE: str(time.time() + limit_seconds - DUMP_SECONDS),
        }
        for rank, log in enumerate(self.logs):
            with log.open("wb") as output:
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._popens.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=common | own,
                        cwd=cwd,
                    )
                )

    @property
    def is_over(self) -> bool:
        """Whether all have ended. If one has failed, or the limit is reached, kills the others."""
        codes = [popen.poll() for popen in self._popens]
        if None in codes and any(codes) and self._deadline > time.monotonic() + LAST_WORDS_SECONDS:
            self._deadline = time.monotonic() + LAST_WORDS_SECONDS
        if None in codes and time.monotonic() > self._deadline:
            self.kill()
            return True
        self.seconds = time.monotonic() - self.began
        return None not in codes

    @property
    def exit_codes(self) -> list[int | None]:
        """Of the ranks; negative: the signal that ended one."""
        return [popen.poll() for popen in self._popens]

    def wait(self) -> list[int | None]:
        """Waits for the end; returns the exit codes."""
        while not self.is_over:
            time.sleep(0.1)
        return self.exit_codes

    def kill(self) -> None:
        """Ends what still runs, at once."""
        for popen in self._popens:
            popen.kill()
        for popen in self._popens:
            popen.wait()
        self.seconds = time.monotonic() - self.began

    def tails(self, lines: int = TAIL_LINES) -> str:
        """The last lines that each rank wrote."""
        shown = []
        for rank, (log, code) in enumerate(zip(self.logs, self.exit_codes, strict=True)):
            text = log.read_text(errors="replace").splitlines()
            shown.append(f"rank {rank}, exit code {code}:")
            shown += [f"  | {line}" for line in text[-lines:]]
        return "\n".join(shown)
