"""The one thread that drives a network library: commands, timers, and a place to sleep.

One thread, because thread-safe modes of the libraries cost latency and because two threads that
poll on few cores slow each other down. It sleeps in epoll, so that it costs nothing while idle.

The thread needs the GIL between calls of the library. Where another thread hogs it, each of them
can wait for Python's switch interval, 5 ms unless the process sets
:data:`SWITCH_INTERVAL_SECONDS`.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_SECONDS: Final = 2e-4
"""The argument of ``sys.setswitchinterval`` in a process whose other threads are busy: Python's
default would add 10 ms to a tick, and tenths of a second to a ping on a busy machine."""

MOVING_POLL_FACTOR = 10

_TIMER_SLACK_NANOSECONDS = 1000
_PR_SET_TIMERSLACK = 29

_START_TIMEOUT_SECONDS = 60.0
_MAX_SLEEP_SECONDS = 60.0
_MIN_COMPACT_TIMERS = 512


class Timer:
    """A callback at a time; ``cancel`` also drops what the callback holds."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class OwnerResult:
    """One answer; the first one counts, and none once the waiting thread has given up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._taken = False
        self._value: Any = None

    def set(self, value: Any) -> bool:
        """Answers with ``value``, which may be an exception; returns whether it counts."""
        with self._lock:
            if self._taken:
                return False
            self._taken = True
        self._value = value
        self._ready.set()
        return True

    def get(self, timeout_seconds: float) -> Any:
        """Returns the value, or raises it if it is an exception.

        Raises:
            TimeoutError: no answer came; a later one does not count.
        """
        if not self._ready.wait(max(timeout_seconds, 0.0)):
            with self._lock:
                given_up = not self._taken
                self._taken = True
            if given_up:
                raise TimeoutError(f"no answer from the owner thread in {timeout_seconds:.3g} s")
            self._ready.wait(1.0)
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class OwnerThread:
    """Owns a network library and runs commands, timers and the library's events on one thread.

    ``submit``, ``start`` and ``stop`` are for any thread; every other method is for the owner
    thread only. A subclass says how to open the library, what a turn of it is, and whether it may
    sleep.

    Args:
        name: of the thread.
        pause_seconds: between two looks while it polls, without the GIL. A thread that polls
            without a pause holds it nearly all the time, and lets others in at switch intervals
            only; but some libraries move bytes only while they are polled.
        busy_poll_seconds: after activity, how long to poll before sleeping; MOVING_POLL_FACTOR
            times as long while messages are under way, since a GPU's copies wake nobody up.
    """

    def __init__(self, name: str, *, pause_seconds: float, busy_poll_seconds: float) -> None:
        self._name = name
        self._pause_seconds = pause_seconds
        self._busy_poll_seconds = busy_poll_seconds
        self._moving_poll_seconds = MOVING_POLL_FACTOR * busy_poll_seconds
        self._commands: deque[Callable[[], None]] = deque()
        self._awaited: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_order = itertools.count()
        self._compact_timers_at = _MIN_COMPACT_TIMERS
        self._wakeup_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wakeup_pending = False
        self._wakeup_lock = threading.Lock()
        self._busy_poll_until = 0.0
        self._turn_began: float | None = None
        self._stop_deadline: float | None = None
        self._started = threading.Event()
        self._start_error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def thread_id(self) -> int:
        return self._thread.ident or 0

    @property
    def stalled_seconds(self) -> float:
        """How long the thread has been in one turn, whose calls of the library take microseconds
        unless something holds them up; 0 while it sleeps. For any thread."""
        began = self._turn_began
        return 0.0 if began is None else time.monotonic() - began

    def start(self) -> None:
        """Starts the thread and waits until the library is up."""
        self._thread.start()
        if not self._started.wait(_START_TIMEOUT_SECONDS):
            raise RuntimeError(f"{self._name} did not start within {_START_TIMEOUT_SECONDS} s")
        if self._start_error is not None:
            raise self._start_error

    def submit(self, command: Callable[[], None]) -> None:
        """Has ``command`` run on the owner thread soon; after ``stop`` it is dropped."""
        self._commands.append(command)
        if self._wakeup_pending or threading.get_ident() == self._thread.ident:
            return
        with self._wakeup_lock:
            if not self._wakeup_pending and self._wakeup_descriptor >= 0:
                self._wakeup_pending = True
                os.eventfd_write(self._wakeup_descriptor, 1)

    def stop(self, timeout_seconds: float) -> bool:
        """Ends the thread once the network is done with this process's memory, at the latest after
        ``timeout_seconds``; returns whether it ended. Any thread but the owner's."""
        self.submit(lambda: self._begin_stop(timeout_seconds * 0.7))
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Runs ``callback`` at ``time.monotonic()`` = ``when`` or soon after."""
        if len(self._timers) >= self._compact_timers_at:
            # Transfers end long before their deadlines: without this their timers would pile up.
            self._timers = [entry for entry in self._timers if entry[2].callback is not None]
            heapq.heapify(self._timers)
            self._compact_timers_at = max(_MIN_COMPACT_TIMERS, 2 * len(self._timers))
        timer = Timer(when, callback)
        heapq.heappush(self._timers, (when, next(self._timer_order), timer))
        return timer

    def call_when(self, ready: Callable[[], bool], callback: Callable[[], None]) -> None:
        """Runs ``callback`` once ``ready()`` is True, which is asked at short intervals."""
        self._awaited.append((ready, callback))

    def _open(self, poller: select.epoll) -> None:
        """Starts the library, and registers with ``poller`` what wakes the thread up."""
        raise NotImplementedError

    def _progress(self) -> bool:
        """Does what the library has to do; returns whether there was anything."""
        raise NotImplementedError

    def _is_moving(self) -> bool:
        """Returns whether the library has messages under way."""
        raise NotImplementedError

    def _may_sleep(self) -> bool:
        """Returns whether an event of the poller will come before there is anything to do."""
        raise NotImplementedError

    def _is_quiet(self) -> bool:
        """Returns whether the network is done with this process's memory."""
        raise NotImplementedError

    def _shut_down(self) -> None:
        """Ends the library. Commands and timers have gone."""
        raise NotImplementedError

    def _on_events(self, events: list[tuple[int, int]]) -> None:
        """Takes what the poller has found after a sleep."""

    def _run(self) -> None:
        _sharpen_sleep()
        with select.epoll() as poller:
            try:
                poller.register(self._wakeup_descriptor, select.EPOLLIN)
                self._open(poller)
            except Exception as error:
                self._start_error = error
                return
            finally:
                self._started.set()
            while True:
                worked = self._turn()
                if self._may_stop():
                    break
                # Whatever was done may have made more to do: look again first.
                if not worked:
                    self._sleep(poller)
        self._end()

    def _turn(self) -> bool:
        """Does all there is to do; returns whether there was anything."""
        self._turn_began = time.monotonic()
        worked = self._progress()
        worked |= self._run_commands()
        worked |= self._run_awaited()
        worked |= self._run_timers()
        if worked:
            self._busy_poll_until = time.monotonic() + self._busy_poll_seconds
        self._turn_began = None
        return worked

    def _sleep(self, poller: select.epoll) -> None:
        if self._commands:
            return
        now = time.monotonic()
        poll_until = self._busy_poll_until + (self._moving_poll_seconds * self._is_moving())
        if self._awaited or now < poll_until:
            if self._pause_seconds:
                time.sleep(self._pause_seconds)
            return
        if not self._may_sleep() or self._commands:
            return
        next_timer = self._timers[0][0] if self._timers else now + _MAX_SLEEP_SECONDS
        self._on_events(poller.poll(min(max(next_timer - now, 0.0), _MAX_SLEEP_SECONDS)))

    def _run_commands(self) -> bool:
        if self._wakeup_pending:
            # Cleared before the commands are read: one that comes later wakes the thread again.
            with self._wakeup_lock, contextlib.suppress(BlockingIOError):
                self._wakeup_pending = False
                os.eventfd_read(self._wakeup_descriptor)
        # Only those that are here now: callbacks may add more, forever.
        commands = [self._commands.popleft() for _ in range(len(self._commands))]
        for command in commands:
            self._guard(command)
        return bool(commands)

    def _run_awaited(self) -> bool:
        if not self._awaited:
            return False
        awaited, self._awaited = self._awaited, []
        for ready, callback in awaited:
            if ready():
                self._guard(callback)
            else:
                self._awaited.append((ready, callback))
        return len(self._awaited) < len(awaited)

    def _run_timers(self) -> bool:
        now = time.monotonic()
        fired = False
        while self._timers and self._timers[0][0] <= now:
            _, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                fired = True
                self._guard(timer.callback)
        return fired

    def _guard(self, action: Callable[[], None]) -> None:
        """Runs ``action``; one faulty callback must not end the thread that all others need."""
        try:
            action()
        except Exception:
            logger.exception("unexpected error on the %s thread", self._name)

    def _begin_stop(self, timeout_seconds: float) -> None:
        self._stop_deadline = time.monotonic() + timeout_seconds
        self.call_at(self._stop_deadline, lambda: None)

    def _may_stop(self) -> bool:
        if self._stop_deadline is None:
            return False
        quiet = self._is_quiet() and not self._commands
        return quiet or time.monotonic() >= self._stop_deadline

    def _end(self) -> None:
        with self._wakeup_lock:
            os.close(self._wakeup_descriptor)
            self._wakeup_descriptor = -1
        self._commands.clear()
        self._awaited.clear()
        self._timers.clear()
        self._shut_down()


def _sharpen_sleep() -> None:
    """Lets this thread's short sleeps be short: Linux adds 50 us to them by default."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NANOSECONDS, 0, 0, 0)
