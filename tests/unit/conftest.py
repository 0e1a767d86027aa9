"""Holds this ring to what it is: pure, so that all of it runs on every save."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

_FORBIDDEN = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "socket.bind", "socket.connect"}
)
_LONGEST_SLEEP_SECONDS = 0.01
"""What a thread that polls may sleep; a test that waits belongs into another ring."""

_running: list[str] = []


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if not _running:
        return
    sleeps = event == "time.sleep" and arguments[0] > _LONGEST_SLEEP_SECONDS  # type: ignore[operator]
    if sleeps or event in _FORBIDDEN:
        raise AssertionError(f"{_running[-1]}: {event}{arguments} in tests/unit")


sys.addaudithook(_refuse)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _running.append(item.nodeid)
    try:
        return (yield)
    finally:
        _running.pop()
