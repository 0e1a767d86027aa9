"""Waiting for a name that another process may hold."""

from __future__ import annotations

import threading

import pytest

from distca.contract import rpc
from distca.contract.held import Patience


def held(retry_after_seconds: float) -> rpc.Held:
    error = rpc.Held("OpenJob", "cp:1", "the name is held")
    error.retry_after_seconds = retry_after_seconds
    return error


class Name:
    """Is refused so often."""

    def __init__(self, *refusals: Exception) -> None:
        self.refusals = list(refusals)
        self.waited: list[float] = []

    def join(self, waited_seconds: float) -> str:
        self.waited.append(waited_seconds)
        if self.refusals:
            raise self.refusals.pop(0)
        return "joined"


def patience(timeout_seconds: float, *, gives_up: bool = False) -> Patience:
    giving_up = threading.Event()
    if gives_up:
        giving_up.set()
    return Patience("rank 0", timeout_seconds=timeout_seconds, giving_up=giving_up)


def test_it_asks_again_until_the_name_is_free(caplog: pytest.LogCaptureFixture) -> None:
    name = Name(held(0.001), held(0.001))
    assert patience(60.0).ask(name.join) == "joined"
    assert name.waited[0] == 0.0
    assert 0.0 < name.waited[1] < name.waited[2]
    assert caplog.text.count("rank 0 waits for its name for up to 60 s") == 1


def test_a_wait_that_would_end_too_late_does_not_begin() -> None:
    name = Name(held(61.0))
    with pytest.raises(rpc.Held):
        patience(60.0).ask(name.join)
    assert len(name.waited) == 1


def test_who_gives_up_asks_no_more() -> None:
    name = Name(held(30.0))
    with pytest.raises(rpc.Held):
        patience(60.0, gives_up=True).ask(name.join)
    assert len(name.waited) == 1


def test_any_other_refusal_is_the_answer() -> None:
    with pytest.raises(rpc.AlreadyExists):
        patience(60.0).ask(Name(rpc.AlreadyExists("OpenJob", "cp:1", "the job lives")).join)
