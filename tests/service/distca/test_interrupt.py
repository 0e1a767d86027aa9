"""What signals do to our processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distca.process.interrupt import let_sigterm_end_process_1
from tests.support.programs import RUN_SECONDS, ran, ran_python
from tests.support.waiting import eventually


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether process ``pid`` has a handler for ``number`` of its own."""
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.fixture(autouse=True)
def sigterm_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_process_1_ends_on_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    let_sigterm_end_process_1()
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143


def test_any_other_process_keeps_the_kernels_default() -> None:
    before = signal.getsignal(signal.SIGTERM)
    let_sigterm_end_process_1()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_process_that_ends_at_once_does_so_in_the_middle_of_a_call_and_only_meanwhile() -> None:
    """As a compiler's: the main thread comes back to Python only seconds later."""
    code = """
import ctypes, os, signal, threading
from distca.process.interrupt import ending_at_once
with ending_at_once():
    pass
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("as before", flush=True)
with ending_at_once():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    for _ in range(20):  # the signal interrupts a sleep
        ctypes.CDLL(None).sleep(20)
"""
    done = ran_python(code, timeout=15)
    assert (done.returncode, done.stdout, done.stderr) == (130, "as before\n", "Interrupted.\n")


IGNORING = ("sh", "-c", """trap '' INT HUP; exec "$0" "$@" """)
"""Starts a program as nohup and the background of a script do."""


def ignoring(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return ran(*IGNORING, sys.executable, *arguments, timeout=timeout)


@pytest.mark.parametrize("what", ["StopRequest()", "ending_at_once()"])
def test_what_a_process_was_started_to_ignore_stays_ignored(what: str) -> None:
    code = f"""
import signal
from distca.process.interrupt import StopRequest, ending_at_once
with {what} as stop:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGHUP)
    print(getattr(stop, "requested", False))
    if stop is not None:
        signal.raise_signal(signal.SIGTERM)
        print(stop.requested)
"""
    done = ignoring("-c", code)
    assert done.returncode == 0, done
    assert done.stdout.split() == (["False", "True"] if what == "StopRequest()" else ["False"])


@pytest.mark.parametrize("service", ["control-plane", "attention-node"])
def test_a_service_in_the_background_of_a_script_is_not_interrupted_but_terminated(
    service: str, tmp_path: Path
) -> None:
    arguments = {
        "control-plane": ("--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0"),
        "attention-node": ("--control-plane=127.0.0.1:1", "--shape=1:1:8:float32"),
    }[service]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(
            [*IGNORING, sys.executable, "-m", "distca", service, *arguments], stderr=log
        )
        try:
            eventually(lambda: handles(process.pid, signal.SIGTERM), RUN_SECONDS)
            process.send_signal(signal.SIGINT)
            time.sleep(1)
            assert process.poll() is None, (tmp_path / "log").read_text()
            process.terminate()
            assert process.wait(20) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
        finally:
            process.kill()


def test_a_supervised_process_can_be_interrupted_all_the_same() -> None:
    code = """
import os, subprocess, sys
child = [sys.executable, "-m", "distca.child", str(os.getpid()), "health", "--address=127.0.0.1:1"]
running = subprocess.Popen([*child, "--timeout-seconds=50"])
from signal import SIGINT
from tests.service.distca.test_interrupt import handles
from tests.support.waiting import eventually
eventually(lambda: handles(running.pid, SIGINT), 50.0)
running.send_signal(SIGINT)
# As in test_interrupt_commands: in the middle of an import it ends by the signal itself.
print(running.wait(20) in (130, -SIGINT))
"""
    assert ignoring("-c", code).stdout == "True\n"


def test_tests_of_interrupts_do_not_depend_on_how_they_were_started() -> None:
    """As by `nohup make test &`."""
    code = "import signal, tests.conftest; signal.raise_signal(signal.SIGINT)"
    assert "KeyboardInterrupt" in ignoring("-c", code).stderr
