"""Ranks of a framework, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SECONDS = 400.0
"""Frameworks are slow to import on two busy cores."""


def run_ranks(module: str, n_ranks: int, folder: Path, *arguments: str) -> list[str]:
    """Runs ``python -m module FOLDER ARGUMENTS RANK`` for each rank; returns what they printed.

    Raises:
        AssertionError: one has failed; with its last lines.
    """
    running = []
    for rank in range(n_ranks):
        with (folder / f"rank-{rank}.log").open("w") as log:
            command = [sys.executable, "-W", "ignore", "-m", module, str(folder), *arguments]
            running.append(
                subprocess.Popen([*command, str(rank)], stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        codes = [process.wait(SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
    printed = [(folder / f"rank-{rank}.log").read_text() for rank in range(n_ranks)]
    for rank, code in enumerate(codes):
        assert code == 0, f"rank {rank} ended with {code}:\n{printed[rank][-6000:]}"
    return printed
