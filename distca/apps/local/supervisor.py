"""Supervision: when one process dies, the others end too, and the first to die is named."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from distca.apps.local.process import LocalProcess
from distca.contract.timeouts import default_seconds
from distca.errors import DistcaError

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
START_TIMEOUT_SECONDS = default_seconds("local_start_seconds")
"""A limit for hangs only: on its very first start a control plane compiles its planner, most
of a minute on an idle core, and the machine may be busy."""
SETTLE_SECONDS = 1.0
"""How long after the first death others may still follow before the cause is chosen."""
TERMINATE_SECONDS = default_seconds("local_terminate_seconds")
"""How long a process that was asked to exit may take before it is killed."""


class Supervisor:
    """Starts processes and never leaves one behind: a context manager that ends all of them.

    Processes are ended in the reverse order of their start: who depends on others goes first.

    Args:
        stopping: whether the user has asked to stop; looked at while waiting for a start.
    """

    def __init__(self, stopping: Callable[[], bool] = lambda: False) -> None:
        self._stopping = stopping
        self._processes: list[LocalProcess] = []

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end_all()

    def watch(self, process: LocalProcess) -> LocalProcess:
        """Watches ``process`` from now on, and returns it."""
        self._processes.append(process)
        logger.info("started %s: pid %d, log %s", process.name, process.pid, process.log)
        return process

    def wait_for_file(self, process: LocalProcess, path: Path) -> str:
        """The text of the file that ``process`` writes when it is ready.

        Raises:
            DistcaError: a process died first, or START_TIMEOUT_SECONDS passed.
            KeyboardInterrupt: the user asked to stop.
        """
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not path.exists():
            # First: Ctrl-C reaches one that is just being started, too.
            if self._stopping():
                raise KeyboardInterrupt
            self.check()
            if time.monotonic() > deadline:
                raise DistcaError(
                    f"{process.name} did not become ready within {START_TIMEOUT_SECONDS:.0f} s"
                    + _quote_log(process)
                )
            time.sleep(POLL_SECONDS)
        return path.read_text().strip()

    def check(
        self, done: Collection[LocalProcess] = (), done_codes: Collection[int] = (0,)
    ) -> None:
        """Checks that all processes run, but for those of ``done``, which may have exited with
        one of ``done_codes``.

        Raises:
            DistcaError: one has died. The message names it, says how it ended and quotes
                its log; what other processes said then follows.
        """

        def failed(process: LocalProcess) -> bool:
            code = process.exit_code
            return code is not None and not (process in done and code in done_codes)

        if not any(failed(process) for process in self._processes):
            return
        deadline = time.monotonic() + SETTLE_SECONDS
        order: list[LocalProcess] = []
        while time.monotonic() < deadline:
            order += [
                process for process in self._processes if process not in order and failed(process)
            ]
            time.sleep(POLL_SECONDS)
        raise DistcaError(_describe(order))

    def end_all(self) -> None:
        """Ends every process that still runs: asks first, then kills. Never raises."""
        for process in reversed(self._processes):
            process.terminate()
        deadline = time.monotonic() + TERMINATE_SECONDS
        while time.monotonic() < deadline:
            if all(process.exit_code is not None for process in self._processes):
                break
            time.sleep(POLL_SECONDS)
        for process in self._processes:
            if process.exit_code is None:
                logger.warning("%s does not exit; killing it", process.name)
            process.kill()
        self._processes.clear()


def _describe(dead: Sequence[LocalProcess]) -> str:
    """Names the cause among ``dead``, given in the order in which they were seen dead.

    A process that a signal killed did not die of the others' deaths, while one that exited with an
    error may well have.
    """
    killed = [process for process in dead if (process.exit_code or 0) < 0]
    cause = (killed or dead)[0]
    lines = [f"{cause.name} (pid {cause.pid}) {cause.describe_end()}" + _quote_log(cause)]
    for other in dead:
        if other is not cause:
            said = other.log_tail()[-1:] or [""]
            lines.append(f"Then {other.name} {other.describe_end()}: {said[0].strip()}")
    return "\n".join(lines)


def _quote_log(process: LocalProcess) -> str:
    tail = process.log_tail()
    if not tail:
        return f"; it wrote nothing to its log {process.log}"
    return f"; the last lines of {process.log}:\n" + "\n".join(f"  | {line}" for line in tail)
