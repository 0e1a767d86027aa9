"""The owner thread says when it is held up, and the process where its main thread stands."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from attention_node.load_meter import LoadMeter
from data_plane.owner_thread import OwnerThread
from data_plane.standing import call_of_main_thread
from tests.support.waiting import eventually


class Library(OwnerThread):
    """A network library in which nothing happens."""

    def _open(self, poller: object) -> None:
        pass

    def _progress(self) -> bool:
        return False

    def _is_moving(self) -> bool:
        return False

    def _may_sleep(self) -> bool:
        return True

    def _is_quiet(self) -> bool:
        return True

    def _shut_down(self) -> None:
        pass


@pytest.fixture
def library() -> Iterator[Library]:
    library = Library("library", pause_seconds=0.0, busy_poll_seconds=0.0)
    library.start()
    yield library
    assert library.stop(5.0)


def test_a_thread_that_is_held_up_says_for_how_long(library: Library) -> None:
    time.sleep(0.2)
    assert library.stalled_seconds < 0.1, "asleep is not held up"
    held = threading.Event()
    library.submit(lambda: None if held.wait(30.0) else pytest.fail("held too long"))
    eventually(lambda: library.stalled_seconds > 0.2)
    held.set()
    eventually(lambda: library.stalled_seconds == 0.0)


def in_another_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def test_the_call_of_the_main_thread_is_named() -> None:
    where = in_another_thread(call_of_main_thread)
    assert "threading.py" in where
    assert "test_owner_thread.py" in where


@pytest.mark.parametrize(("seconds", "says"), [(0.0, False), (0.5, False), (5.0, True)])
def test_a_server_tells_where_its_process_stands(seconds: float, says: bool) -> None:
    class Idle:
        queued_parts = open_ticks = in_use_bytes = 0
        oldest_ready_seconds = kernel_seconds = 0.0

        def stats(self) -> Idle:
            return self

    idle: Any = Idle()
    load = in_another_thread(LoadMeter(idle, idle, idle, lambda: 0, lambda: seconds).read)
    assert ("test_owner_thread.py" in load.stands_in) is says
