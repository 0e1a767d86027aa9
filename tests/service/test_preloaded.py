"""Forks run programs as processes of their own do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from data_plane.transport_facts import NIXL_PACKAGES
from tests import ROOT
from tests.support.preloaded import PRELOADED, preloaded_modules, run, start

SECONDS = 60.0


def test_a_program_has_arguments_environment_folder_and_output_of_its_own(tmp_path: Path) -> None:
    program = (
        "import atexit, os, sys\n"
        "atexit.register(print, 'ended')\n"
        "print(sys.argv, dict(os.environ), os.getcwd(), __name__)\n"
        "print('late', file=sys.stderr)\n"
    )
    process = start(program, "a", "b", log=tmp_path / "log", environment={"NAME": "value"})
    assert process.wait(SECONDS) == 0
    says = {f"['-c', 'a', 'b'] {{'NAME': 'value'}} {ROOT} __main__", "late", "ended"}
    assert set((tmp_path / "log").read_text().splitlines()) == says
    assert "NAME" not in os.environ


def test_exit_codes_are_those_of_a_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert start("raise SystemExit(3)", log=log).wait(SECONDS) == 3
    assert start("1 / 0", log=log).wait(SECONDS) == 1
    assert "Traceback" in log.read_text()
    assert "ZeroDivisionError" in log.read_text()


def test_a_program_is_run_to_its_end() -> None:
    ended = run("import sys; print('é'); sys.exit(sys.argv[1])", "mistake", timeout=SECONDS)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "é\n", "mistake\n")
    with pytest.raises(subprocess.TimeoutExpired):
        run("import time; time.sleep(60)", timeout=0.05)


def test_signals_reach_it(tmp_path: Path) -> None:
    process = start("import time; time.sleep(60)", log=tmp_path / "log")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None
    process.terminate()
    assert process.wait(SECONDS) == -signal.SIGTERM
    process.kill()
    assert process.poll() == -signal.SIGTERM

    interrupted = start(
        "print('up', flush=True); import time; time.sleep(60)", log=tmp_path / "log"
    )
    while "up" not in (tmp_path / "log").read_text():
        assert interrupted.poll() is None
        time.sleep(0.01)
    interrupted.send_signal(signal.SIGINT)
    # As Python ends after an uncaught KeyboardInterrupt.
    assert interrupted.wait(SECONDS) == -signal.SIGINT


def test_tests_of_nixl_have_no_other_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NIXL_PACKAGES[0], ModuleType(NIXL_PACKAGES[0]))
    assert set(preloaded_modules()) == set(PRELOADED)


def test_a_fork_begins_with_one_thread_no_file_and_no_gpu(tmp_path: Path) -> None:
    """But for multiprocessing's pipes, and at times the file where pytest keeps this process's
    output. With what other forks hold open, it would keep their connections alive."""
    kept = ["/dev/null", *(os.readlink(f"/proc/self/fd/{n}") for n in (1, 2))]
    other = start("import time; time.sleep(60)", log=tmp_path / "other")
    program = (
        "import os, sys\n"
        "links = [f'/proc/self/fd/{n}' for n in os.listdir('/proc/self/fd') if int(n) > 2]\n"
        "opened = [os.readlink(link) for link in links if os.path.exists(link)]\n"
        "opened = [each for each in opened if not each.startswith(('pipe:', *sys.argv[1:]))]\n"
        "torch = sys.modules['torch']\n"
        "print(len(os.listdir('/proc/self/task')), opened, torch.cuda.is_initialized())\n"
    )
    try:
        assert start(program, *kept, log=tmp_path / "log").wait(SECONDS) == 0
    finally:
        other.kill()
    assert (tmp_path / "log").read_text() == "1 [] False\n"
