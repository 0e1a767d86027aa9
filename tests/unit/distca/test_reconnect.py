"""Looking for a control plane."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

import pytest

from distca.contract import reconnect, rpc
from distca.contract.reconnect import Addresses, reach
from tests.support.errors import fails

SETTINGS = rpc.RpcSettings(address="one:1,two:2")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnect, "LONGEST_WAIT_SECONDS", 0.01)


Attempt = Callable[[rpc.RpcSettings], str]


def failing(times: int) -> tuple[list[str], Attempt]:
    asked: list[str] = []

    def attempt(settings: rpc.RpcSettings) -> str:
        asked.append(settings.address)
        if len(asked) <= times:
            raise rpc.RpcError(
                rpc.Reason.UNAVAILABLE, "connect", settings.address, "nobody answers"
            )
        return "here"

    return asked, attempt


def search(attempt: Attempt, timeout_seconds: float = 30.0) -> str:
    return reach(
        attempt,
        Addresses(SETTINGS),
        timeout_seconds=timeout_seconds,
        giving_up=threading.Event(),
    )


def test_addresses_take_turns() -> None:
    asked, attempt = failing(3)
    assert search(attempt) == "here"
    assert asked == ["one:1", "two:2", "one:1", "two:2"]


def test_waits_use_up_no_random_number_of_the_process() -> None:
    before = random.getstate()
    _, attempt = failing(3)
    search(attempt)
    assert random.getstate() == before


def test_who_waits_long_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, attempt = failing(4)
    search(attempt)
    assert not caplog.records, "it was a moment"
    monkeypatch.setattr(reconnect, "TOLD_AFTER_SECONDS", 0.0)
    _, attempt = failing(4)
    search(attempt)
    (told,) = caplog.records
    assert told.levelno == logging.WARNING
    assert "one:1, two:2" in told.getMessage()


def test_the_last_error_is_raised_when_time_is_up() -> None:
    _, attempt = failing(10_000)
    with fails(rpc.Reason.UNAVAILABLE):
        search(attempt, timeout_seconds=0.05)
