"""Supervision of real processes: who died first is named, and nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from distca.apps.local import supervisor as supervision
from distca.apps.local.process import LocalProcess
from distca.apps.local.supervisor import Supervisor
from distca.errors import DistcaError
from tests.support.waiting import eventually


class ScriptProcess(LocalProcess):
    """Runs a Python text instead of a distca command, tied to its parent in the same way."""

    def __init__(self, name: str, code: str, log: Path) -> None:
        self._code = code
        super().__init__(name, [], log, os.environ)

    def command(self) -> list[str]:
        tie = f"from distca.child import die_with_parent; die_with_parent({os.getpid()})\n"
        return [sys.executable, "-c", tie + self._code]


SLEEP = "import time; print('ready', flush=True); time.sleep(60)"


def start(supervisor: Supervisor, tmp_path: Path, name: str, code: str) -> LocalProcess:
    return supervisor.watch(ScriptProcess(name, code, tmp_path / f"{name}.log"))


def failure(supervisor: Supervisor) -> str:
    """The message of the failure that the supervisor finds, at the latest in a while."""

    def look() -> bool:
        supervisor.check()
        return False

    with pytest.raises(DistcaError) as raised:
        eventually(look)
    return str(raised.value)


def test_all_processes_are_ended_at_the_end(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        processes = [start(supervisor, tmp_path, f"p{index}", SLEEP) for index in range(2)]
        supervisor.check()
    assert all(process.exit_code is not None for process in processes)
    assert not any(psutil.pid_exists(process.pid) for process in processes)


def test_process_that_ignores_sigterm_and_its_own_children_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "TERMINATE_SECONDS", 0.5)
    code = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True); child.wait()"
    )
    with Supervisor() as supervisor:
        process = start(supervisor, tmp_path, "stubborn", code)
        eventually(lambda: bool(process.log_tail()))
        child = psutil.Process(int(process.log_tail()[0]))
    assert process.exit_code == -signal.SIGKILL
    eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_killed_process_is_the_cause_although_another_failed_because_of_it(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        victim = start(supervisor, tmp_path, "victim", SLEEP)
        eventually(lambda: bool(victim.log_tail()))
        start(supervisor, tmp_path, "dependent", "print('lost victim'); raise SystemExit(1)")
        os.kill(victim.pid, signal.SIGKILL)
        message = failure(supervisor)
    assert message.splitlines()[0].startswith("victim (pid ")
    assert "was killed by SIGKILL (exit code -9)" in message
    assert "  | ready" in message
    assert message.splitlines()[-1] == "Then dependent exited with code 1: lost victim"


def test_only_those_who_may_be_done_may_exit(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        done = start(supervisor, tmp_path, "done", "")
        eventually(lambda: done.exit_code == 0)
        supervisor.check(done=[done])
        assert "done (pid" in failure(supervisor)


def test_waiting_for_a_file_ends_when_a_process_dies_time_is_up_or_the_user_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "ready"
    with Supervisor() as supervisor:
        writer = f"import pathlib, time; pathlib.Path({str(ready)!r}).write_text('a:1\\n');"
        process = start(supervisor, tmp_path, "server", writer + "time.sleep(60)")
        assert supervisor.wait_for_file(process, ready) == "a:1"
        monkeypatch.setattr(supervision, "START_TIMEOUT_SECONDS", 0.2)
        with pytest.raises(DistcaError):
            supervisor.wait_for_file(process, tmp_path / "never")
        start(supervisor, tmp_path, "broken", "raise SystemExit(4)")
        monkeypatch.setattr(supervision, "START_TIMEOUT_SECONDS", 20.0)
        with pytest.raises(DistcaError):
            supervisor.wait_for_file(process, tmp_path / "never")
    with Supervisor(stopping=lambda: True) as supervisor:
        process = start(supervisor, tmp_path, "server", SLEEP)
        with pytest.raises(KeyboardInterrupt):
            supervisor.wait_for_file(process, tmp_path / "never")
    assert process.exit_code is not None


def test_no_process_survives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib\n"
        "from tests.service.distca.test_supervisor import SLEEP, ScriptProcess\n"
        f"process = ScriptProcess('orphan', SLEEP, pathlib.Path({str(tmp_path / 'log')!r}))\n"
        "print(process.pid, flush=True); time.sleep(60)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    orphan = psutil.Process(int(launcher.stdout.readline()))
    eventually(lambda: "ready" in (tmp_path / "log").read_text())
    launcher.kill()
    launcher.wait()
    eventually(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE)
    launcher.stdout.close()
