"""What signals do to our processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from distca.process.interrupt import let_sigterm_end_process_1


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
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=15, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "as before\n", "Interrupted.\n")
