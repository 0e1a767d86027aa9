"""Processes of tests that start with the libraries already in them.

A process that imports torch, UCX and gRPC and loads the planners' machine code takes four seconds
of a core before it does anything. One process does that here, and what tests start are its forks.
Each runs its program as ``python -c`` would: with a ``__main__``, arguments, environment, output
and exit code of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

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
    "typer.rich_utils",
    "rich.markdown",
)
"""What forks find imported. No module may start a thread or ask for a GPU: a fork has neither."""

_NEWER = ("typer._adapters",)
"""What some versions of the libraries do not have."""

_UCXX = "data_plane.ucxx.transport"

_FORK_SECONDS = 200.0
"""Until the first fork, which waits for the libraries, on a busy machine."""

_MESSAGE_BYTES = 1 << 17
_STATUS_BYTES = 4


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU; asked without CUDA."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


class PreloadedProcess:
    """A fork that runs a program; used as a :class:`subprocess.Popen` is."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._status.setblocking(False)

    def poll(self) -> int | None:
        """The exit code, or the negative number of the signal that ended it; None while it runs."""
        if self.returncode is None:
            with contextlib.suppress(BlockingIOError):
                status = self._status.recv(_STATUS_BYTES)
                if len(status) != _STATUS_BYTES:
                    raise RuntimeError("the process that forks has ended")
                self.returncode = int.from_bytes(status, signed=True)
                self._status.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or :class:`subprocess.TimeoutExpired`."""
        if self.returncode is None:
            ended, _, _ = select.select([self._status], [], [], timeout)
            if timeout is not None and not ended:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self.poll()
        assert self.returncode is not None
        return self.returncode

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
    with log.open("wb") as output:
        return _fork(program, arguments, environment, output.fileno(), output.fileno())


def run(
    program: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    timeout: float,
) -> subprocess.CompletedProcess[str]:
    """Runs ``program`` as :func:`start` does, to its end, which must come within ``timeout``
    seconds."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = _fork(program, arguments, environment, output.fileno(), errors.fileno())
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        said = []
        for file in (output, errors):
            file.seek(0)
            said.append(file.read())
    return subprocess.CompletedProcess(["-c", *arguments], code, *said)


def _fork(
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None,
    output: int,
    errors: int,
) -> PreloadedProcess:
    values = dict(os.environ if environment is None else environment)
    request = json.dumps({"program": program, "arguments": arguments, "environment": values})
    ours, theirs = socket.socketpair()
    with theirs:
        return _server().fork(request.encode(), (output, errors, theirs.fileno()), ours)


class _Server:
    """The process that forks."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *preloaded_modules()],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                cwd=ROOT,
                env=_server_environment(),
            )
        self._requests.settimeout(_FORK_SECONDS)
        atexit.register(self.end)

    def fork(
        self, request: bytes, descriptors: Sequence[int], status: socket.socket
    ) -> PreloadedProcess:
        """A fork with these ``descriptors``: of its output, its errors and the other end of
        ``status``."""
        with self._lock:
            socket.send_fds(self._requests, [request], descriptors)
            answer = self._requests.recv(_MESSAGE_BYTES)
        if not answer:
            raise RuntimeError(f"the process that forks has ended: {self._popen.wait()}")
        return PreloadedProcess(int(answer), status)

    def end(self) -> None:
        """Its forks run on."""
        self._requests.close()
        self._popen.wait()


def preloaded_modules() -> tuple[str, ...]:
    """With ucxx, but in tests of nixl: each brings a UCX, and two of them in one process crash."""
    has_nixl = not sys.modules.keys().isdisjoint(NIXL_PACKAGES)
    return PRELOADED if has_nixl else (*PRELOADED, _UCXX)


def _server_environment() -> dict[str, str]:
    """One thread, since a fork loses all others; and without what typer decides by, when it is
    loaded, whether help has colours."""
    colours = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TERMINAL_WIDTH")
    kept = {name: value for name, value in os.environ.items() if name not in colours}
    return {**kept, "OMP_NUM_THREADS": "1"}


@functools.cache
def _server() -> _Server:
    return _Server()


@dataclass(frozen=True)
class _Program:
    program: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    output: int
    errors: int


def _serve(requests: socket.socket) -> _Program | None:
    """Forks until the tests have ended; returns in forks alone, with what they shall run."""
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Ctrl-C reaches everybody; the tests end this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    statuses: dict[int, socket.socket] = {}
    while True:
        readable, _, _ = select.select([requests, woken], [], [])
        if woken in readable:
            woken.recv(_MESSAGE_BYTES)
            _report_ended(statuses)
        if requests not in readable:
            continue
        message, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 3)
        if not message:
            return None
        output, errors, status = descriptors
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # Also where a shell has begun the tests in the background, and had it ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for each in (requests, woken, wake, socket.socket(fileno=status), *statuses.values()):
                each.close()
            return _Program(**json.loads(message), output=output, errors=errors)
        os.close(output)
        os.close(errors)
        statuses[pid] = socket.socket(fileno=status)
        requests.send(str(pid).encode())


def _report_ended(statuses: dict[int, socket.socket]) -> None:
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with statuses.pop(pid) as reader, contextlib.suppress(BrokenPipeError):
            code = os.waitstatus_to_exitcode(status)
            reader.send(code.to_bytes(_STATUS_BYTES, signed=True))


def _run(program: _Program) -> NoReturn:
    for descriptor, standard in ((program.output, 1), (program.errors, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(program.environment)
    sys.argv = ["-c", *program.arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    code = 0
    try:
        exec(compile(program.program, "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _end(code)


def _end(code: int) -> NoReturn:
    """Ends the interpreter but for the last of it, to take apart all modules: half a second of a
    core, for memory that is not the fork's own."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _preload(modules: Sequence[str]) -> None:
    if has_gpu():
        # Whatever asks for CUDA when it is imported, as libraries may, leaves none to a fork.
        return
    for name in modules:
        importlib.import_module(name)
    for name in _NEWER:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    planners = importlib.import_module("control_plane.planner.planners")
    for planner in planners.PLANNERS.values():
        planners.load(planner)
    # Collections in forks would copy all of this.
    gc.collect()
    gc.freeze()


def _main() -> None:
    _preload(sys.argv[2:])
    program = _serve(socket.socket(fileno=int(sys.argv[1])))
    if program is not None:
        _run(program)


if __name__ == "__main__":
    _main()
