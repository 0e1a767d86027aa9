"""Ctrl-C ends every command in one line, with exit code 130, whatever it is at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from distca import cli
from distca.apps.certs.authority import Authority
from distca.contract.identity import Identity, Role
from tests.support import preloaded
from tests.support.preloaded import PreloadedProcess

pytestmark = pytest.mark.timeout(300)

WORK_SECONDS = 6.0
"""Most are at work then; those that are still loading must end in the same way."""

LOADED_BY_ITSELF = {"train", "doctor"}
"""Commands that import what they need as a user's do. The others are forks that have it already: on
two cores all of them together would be loading for half a minute."""

FORKED = """
import os
os.setsid()
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
from distca.__main__ import main
main()
"""

END_SECONDS = 90.0
"""They load at the same time, on a machine with other work."""

AGAIN_SECONDS = 20.0
"""Python drops an interrupt that comes in a destructor or in a weak reference's callback, and runs
many while modules load. Then one presses Ctrl-C again."""

COMMANDS: dict[str, tuple[str, ...]] = {
    "control-plane": ("--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0"),
    "attention-node": (
        "--control-plane=127.0.0.1:1",
        "--shape=1:1:8:float32",
        "--data-host=127.0.0.1",
        "--connect-seconds=100",
    ),
    "train": (
        "--control-plane=127.0.0.1:1",
        "--run-dir={here}/train",
        "--rendezvous=file://{here}/rendezvous",
    ),
    "local": ("--runs-dir={here}/runs", "--steps=100000"),
    "up": ("--address-file={here}/address", "--logs={here}/up", "--nodes=0", "--host=127.0.0.1"),
    "doctor": ("--control-plane=127.0.0.1:1", "--connect-seconds=100"),
    "health": ("--address=127.0.0.1:1", "--timeout-seconds=100"),
    "top": ("--control-plane=127.0.0.1:1", "--once", "--expect-servers=1", "--wait-seconds=100"),
    "profile": ("--shape=32:8:128:float32", "--full", "--output={here}/profile.json"),
    "plan": ("--distribution=prolong", "--ranks=512"),
    "schedule": ("--ranks=64", "--microbatches=8192"),
    "simulate": ("--distribution=prolong", "--gpus=2048,4096"),
}


@dataclass
class Interrupted:
    """How a command ended."""

    code: int
    output: str


def start(command: str, here: Path) -> subprocess.Popen[bytes] | PreloadedProcess:
    arguments = [each.format(here=here) for each in COMMANDS[command]]
    # What a command logs meanwhile, such as that nobody answers yet, is not about the interrupt.
    quiet = {"DISTCA_LOG_LEVEL": "error"}
    environment = {**os.environ, **quiet, "RANK": "0", "WORLD_SIZE": "2", "HOME": str(here)}
    log = here / f"{command}.log"
    if command not in LOADED_BY_ITSELF:
        return preloaded.start(FORKED, command, *arguments, log=log, environment=environment)
    with log.open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "distca", command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )


def _as_shells_say(code: int) -> int:
    """Python ends itself by the signal that has come in the middle of an exec() of text, of which
    dataclasses and numba make use; to a shell that is the same."""
    return 128 - code if code < 0 else code


def end(process: subprocess.Popen[bytes] | PreloadedProcess, deadline: float) -> int:
    """Waits for the process's end, and interrupts it again if it does not come; its exit code."""
    while True:
        rest = max(deadline - time.monotonic(), 1.0)
        try:
            return process.wait(min(rest, AGAIN_SECONDS))
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise
            os.killpg(process.pid, signal.SIGINT)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Interrupted]]:
    """All commands, which run side by side until then."""
    here = tmp_path_factory.mktemp("interrupted")
    authority = Authority.make(timedelta(days=1))
    signed = authority.issue(Identity(role=Role.SERVER, name="a"), lifetime=timedelta(days=1))
    (here / "ca.crt").write_bytes(authority.pem.certificate)
    (here / "server.crt").write_bytes(signed.certificate)
    (here / "server.key").write_bytes(signed.key)
    running = {command: start(command, here) for command in COMMANDS}
    try:
        time.sleep(WORK_SECONDS)
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
        ended = {}
        deadline = time.monotonic() + END_SECONDS
        for command, process in running.items():
            code = _as_shells_say(end(process, deadline))
            ended[command] = Interrupted(code, (here / f"{command}.log").read_text())
        yield ended
    finally:
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def test_all_commands_are_tried_that_take_their_time() -> None:
    assert set(cli.command_line().commands) == {*COMMANDS, "certs"}


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_is_one_line_and_exit_code_130(
    interrupted: dict[str, Interrupted], command: str
) -> None:
    ended = interrupted[command]
    assert (ended.code, ended.output) == (130, "Interrupted.\n"), ended.output
