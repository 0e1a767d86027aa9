"""Processes of tests that start with the libraries already in them.

A process that imports torch, UCX and gRPC and loads the planners' machine code takes four seconds
of a core before it does anything. The server of multiprocessing's forks does that once, and what
tests start are its forks: programs, each run as ``python -c`` would, and ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from torch.multiprocessing.spawn import start_processes

from data_plane.transport_facts import NIXL_PACKAGES
from tests import ROOT

DISTCA = "from distca.cli import main; main()"
"""The command ``distca``, as a program."""

PRELOADED = (
    "attention_node.server",
    "control_plane.server",
    "core_attention.kernels.cpu",
    "distca.cli",
    "grpc.aio",
    "tests.support.random_planner",
    "tests.support.team",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental._attention",
    "trainer_client.step.fsdp",
    "trainer_client.models.transformers",
    # Which some versions of the library do not have.
    "typer._adapters",
    "typer.rich_utils",
    "rich.markdown",
)
"""What forks find imported. No module may start a thread or ask for a GPU: a fork has neither."""

_UCXX = "data_plane.ucxx.transport"

_READ_WHEN_LOADED = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TERMINAL_WIDTH")
"""By these typer decides, when it is loaded, whether help has colours."""


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU; asked without CUDA."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def preloaded_modules() -> tuple[str, ...]:
    """With ucxx, but in tests of nixl: each brings a UCX, and two of them in one process crash."""
    has_nixl = not sys.modules.keys().isdisjoint(NIXL_PACKAGES)
    return PRELOADED if has_nixl else (*PRELOADED, _UCXX)


@functools.cache
def _context() -> ForkServerContext | SpawnContext:
    """Of forks; on a machine with a GPU of new processes, as libraries may ask for CUDA when they
    are imported."""
    if has_gpu():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([*preloaded_modules(), "tests.support.preloading"])
    kept = {name: value for name, value in os.environ.items() if name not in _READ_WHEN_LOADED}
    # One thread, since a fork loses all others.
    with mock.patch.dict(os.environ, {**kept, "OMP_NUM_THREADS": "1"}, clear=True):
        forkserver.ensure_running()
    return context


class PreloadedProcess:
    """A fork that runs a program; used as a :class:`subprocess.Popen` is."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self._process, self.pid = process, process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        """The exit code, or the negative number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or :class:`subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens to a process that has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    program: str, *arguments: str, log: Path, environment: Mapping[str, str] | None = None
) -> PreloadedProcess:
    """Runs ``program``, Python code, in a fork, in the folder of the sources.

    Args:
        program: its code.
        arguments: what it finds in ``sys.argv``, after ``-c``.
        log: the file that its output goes to.
        environment: its variables; those of this process if None. What a library reads when it is
            loaded has been read before, with those of this process.
    """
    log.write_bytes(b"")
    return _start(program, arguments, environment, log, log)


def run(
    program: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    timeout: float,
) -> subprocess.CompletedProcess[str]:
    """Runs ``program`` as :func:`start` does, to its end, which must come within ``timeout``
    seconds."""
    with tempfile.NamedTemporaryFile("r") as output, tempfile.NamedTemporaryFile("r") as errors:
        files = Path(output.name), Path(errors.name)
        process = _start(program, arguments, environment, *files)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(["-c", *arguments], code, output.read(), errors.read())


def run_forked(function: Callable[..., None], arguments: tuple[Any, ...], n_ranks: int) -> None:
    """Calls ``function(rank, *arguments)`` in a process for each rank, and waits for all of them.
    Raises what :func:`torch.multiprocessing.spawn` does."""
    start_processes(function, arguments, n_ranks, start_method=_context().get_start_method())


def _start(
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None,
    output: Path,
    errors: Path,
) -> PreloadedProcess:
    values = dict(os.environ if environment is None else environment)
    given = (program, arguments, values, output, errors)
    # A daemon: what a test has left running ends with the tests.
    process = _context().Process(target=_run, args=given, daemon=True)
    process.start()
    return PreloadedProcess(process)


def _run(
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    output: Path,
    errors: Path,
) -> None:
    for path, standard in ((output, 1), (errors, 2)):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    # Programs start processes of their own, as they may where a shell starts them.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    # Also where a shell has begun the tests in the background, and had it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    is_interrupted = False
    try:
        exec(compile(program, "<string>", "exec"), main.__dict__)
    except KeyboardInterrupt:
        traceback.print_exc()
        is_interrupted = True
    finally:
        # As an interpreter ends, which a process of multiprocessing does not.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    if is_interrupted:
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
