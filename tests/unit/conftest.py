"""Holds this ring to what it is: pure, so that all of it runs on every save."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import SupportsIndex

import pytest

_FORBIDDEN = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "socket.bind", "socket.connect"}
)
LONGEST_SLEEP_SECONDS = 0.1
"""What a test may be held for; a test that waits for longer belongs into another ring."""

_FOLDER = Path(__file__).parent
_running: list[str] = []
_sleep = time.sleep


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if _running and event in _FORBIDDEN:
        raise AssertionError(f"{_running[-1]}: {event}{arguments} in tests/unit")


def _sleep_shortly(seconds: float | SupportsIndex, /) -> None:
    # Servers of other rings that ran in this process before have threads of their own.
    tested = threading.current_thread() is threading.main_thread()
    if tested and float(seconds) > LONGEST_SLEEP_SECONDS:
        raise AssertionError(f"{_running[-1]} sleeps for {seconds} s in tests/unit")
    _sleep(seconds)


sys.addaudithook(_refuse)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    # Kernels of a GPU are compiled by processes.
    if _FOLDER not in item.path.parents or item.get_closest_marker("gpu") is not None:
        return (yield)
    _running.append(item.nodeid)
    time.sleep = _sleep_shortly
    try:
        return (yield)
    finally:
        time.sleep = _sleep
        _running.pop()
