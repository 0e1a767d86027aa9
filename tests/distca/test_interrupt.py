"""What signals do to our processes."""

from __future__ import annotations

import os
import signal
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
