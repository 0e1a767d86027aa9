"""Starts ``distca local`` as a user does, in a process of its own, and watches it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from distca.apps.report.record import TrainingStep
from distca.apps.report.step_log import StepLog
from distca.run_folder import RunFolder
from tests import ROOT

TINY = (
    "--hidden-size=32",
    "--layers=2",
    "--heads=4",
    "--kv-heads=2",
    "--tokens-per-rank=256",
    "--min-backward-tokens=16",
    "--min-forward-tokens=16",
)

START_SECONDS = 200.0
"""Until the first step; the machine may be busy."""


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    exit_code: int
    output: str
    seconds: float


class LocalRun:
    """A running ``distca local``.

    Args:
        home: home directory of its processes, where cost profiles are cached.
        root: where its folder is made.
        name: of the run.
        arguments: of the command, besides the tiny model's.
    """

    def __init__(self, home: Path, root: Path, name: str, *arguments: str) -> None:
        self.folder = RunFolder(root / name)
        self._output = root / f"{name}.output"
        command = [
            sys.executable,
            "-c",
            "from distca.cli import main; main()",
            "local",
            f"--runs-dir={root}",
            f"--name={name}",
            *TINY,
            *arguments,
        ]
        with self._output.open("ab") as output:
            self._popen = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HOME": str(home), "COLUMNS": "120"},
            )

    def steps(self) -> tuple[TrainingStep, ...]:
        """Steps logged so far."""
        return StepLog(self.folder.step_log).read()

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.folder.record.read_text())
        return found

    def verified_steps(self) -> int:
        """How many steps were equal to local attention; all that were compared must be."""
        found = self.record()["verification"]
        assert found["loss"] <= found["loss_tolerance"], found
        assert found["gradient"] <= found["gradient_tolerance"], found
        return int(found["steps"])

    def processes(self) -> dict[str, psutil.Process]:
        """Its processes by command, with a number where there are several: ``"train 1"``."""
        children = psutil.Process(self._popen.pid).children()
        named: dict[str, psutil.Process] = {}
        for child in sorted(children, key=lambda child: child.pid):
            command = next(
                word
                for word in child.cmdline()
                if word in ("control-plane", "attention-node", "train")
            )
            index = sum(name.startswith(command) for name in named)
            named[f"{command} {index}"] = child
        return named

    def wait_for_steps(self, count: int) -> None:
        """Waits until ``count`` steps are logged."""
        self._wait(lambda: len(self.steps()) >= count, START_SECONDS)

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        self._popen.send_signal(signal.SIGINT)

    def wait(self, seconds: float) -> Ended:
        """Waits for its end."""
        began = time.monotonic()
        self._popen.wait(seconds)
        took = time.monotonic() - began
        return Ended(self._popen.returncode, self._output.read_text(), took)

    def kill(self) -> None:
        """Ends it whatever state it is in."""
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait()

    def _wait(self, what: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            if self._popen.poll() is not None:
                raise AssertionError(f"the run ended: {self._output.read_text()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds} s: {self._output.read_text()}")
            time.sleep(0.05)


def all_gone(processes: dict[str, psutil.Process]) -> bool:
    """Whether none of the processes is left."""
    _, alive = psutil.wait_procs(list(processes.values()), timeout=5.0)
    return not alive
