"""The thread that owns a UCX worker: nothing else ever calls UCX.

One thread, because UCX's thread-safe modes cost latency and because two threads that poll on few
cores slow each other down. It sleeps in epoll on the worker's descriptor and on an eventfd for
commands, so that it costs nothing while idle.

The thread needs the GIL between UCX calls. Where another thread hogs it, each turn can wait for
Python's switch interval: ``sys.setswitchinterval(2e-4)`` in the process turns 5 ms into 0.2 ms.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from ucxx._lib import libucxx
from ucxx._lib.arr import Array

from data_plane.ucxx_settings import UcxxSettings

logger = logging.getLogger(__name__)

UCX_ERRORS = (libucxx.UCXError, RuntimeError)
"""One cause gives several classes, some of them plain RuntimeErrors from C++."""

_ANY_TAG = libucxx.UCXXTag(0)
_ANY_TAG_MASK = libucxx.UCXXTagMask(0)
_START_TIMEOUT_SECONDS = 60.0
_MAX_DISCARD_BYTES = 2**30
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


@dataclass(slots=True)
class _InFlight:
    """A UCX request with all it needs: a request does not keep its own memory alive."""

    request: Any
    memory: object
    on_complete: Callable[[Exception | None], None]


class UcxxWorker:
    """Owns a UCX context and worker, and runs commands, timers and completions on one thread.

    ``submit`` is for any thread; every other method is for the owner thread only.

    Args:
        settings: how to use UCX.
        on_message: called with each arrived tag message (a ``TagProbeResult`` whose handle must
            be received or discarded). Matching messages here instead of posting receives to UCX
            tells their length before a byte is written, and leaves an offer that nothing came
            for with no trace in UCX.
    """

    def __init__(self, settings: UcxxSettings, on_message: Callable[[Any], None]) -> None:
        self._settings = settings
        self._on_message = on_message
        self._commands: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_order = itertools.count()
        self._compact_timers_at = _MIN_COMPACT_TIMERS
        self._in_flight: list[_InFlight] = []
        self._undiscardable: list[Any] = []
        self._wakeup_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wakeup_pending = False
        self._wakeup_lock = threading.Lock()
        self._busy_poll_until = 0.0
        self._stop_deadline: float | None = None
        self._started = threading.Event()
        self._start_error: Exception | None = None
        self.ucp: Any = None
        self._thread = threading.Thread(target=self._run, name="ucxx-owner", daemon=True)

    @property
    def thread_id(self) -> int:
        return self._thread.ident or 0

    def start(self) -> None:
        """Starts the thread and waits until UCX is up.

        Raises:
            ValueError: UCX refused an option.
            RuntimeError: UCX did not start.
        """
        self._thread.start()
        if not self._started.wait(_START_TIMEOUT_SECONDS):
            raise RuntimeError(f"UCX did not start within {_START_TIMEOUT_SECONDS} s")
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
        """Ends the thread once no request is pending, at the latest after ``timeout_seconds``;
        returns whether it ended. Any thread but the owner's."""
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

    def track(
        self, request: Any, memory: object, on_complete: Callable[[Exception | None], None]
    ) -> None:
        """Keeps ``memory`` alive until ``request`` completes, then calls
        ``on_complete(error or None)``."""
        entry = _InFlight(request, memory, on_complete)
        if request.completed:
            self._complete(entry)
        else:
            self._in_flight.append(entry)

    def discard(self, message: Any) -> None:
        """Frees an arrived message that nobody wants.

        UCX can only free it by receiving it. Where the sender's endpoint is gone this writes
        nothing, so the memory below stays untouched, that is, virtual.
        """
        if message.length > _MAX_DISCARD_BYTES:
            # Keeping the handle costs a few hundred bytes; dropping it makes UCX complain.
            self._undiscardable.append(message)
            return
        memory = np.empty(max(message.length, 1), dtype=np.uint8)
        request = self.ucp.tag_recv_with_handle(Array(memory), message)
        self.track(request, memory, lambda error: None)

    def _run(self) -> None:
        try:
            self._start_ucx()
        except Exception as error:
            self._start_error = self._explain_start(error)
            return
        finally:
            self._started.set()
        with select.epoll() as poller:
            poller.register(self.ucp.epoll_file_descriptor, select.EPOLLIN)
            poller.register(self._wakeup_descriptor, select.EPOLLIN)
            while True:
                worked = self._turn()
                if self._may_stop():
                    break
                # Whatever was done may have completed further requests: look again first.
                if not worked:
                    self._sleep(poller)
        self._shut_down()

    def _start_ucx(self) -> None:
        if self._settings.on_gpu:
            import torch

            # UCX looks for the thread's CUDA context when it opens its CUDA transports.
            torch.cuda.set_device(torch.device(self._settings.device))
            torch.zeros(1, device=self._settings.device)
        else:
            # Importing ucxx sets this variable, and UCX without CUDA prints a warning about it.
            os.environ.pop("UCX_MEMTYPE_CACHE", None)
        feature = libucxx.Feature
        context = libucxx.UCXContext(
            self._settings.context_options(), (feature.TAG, feature.STREAM, feature.WAKEUP)
        )
        self.ucp = libucxx.UCXWorker(context)
        self.ucp.init_blocking_progress_mode()

    def _explain_start(self, error: Exception) -> Exception:
        options = self._settings.context_options()
        if isinstance(error, libucxx.UCXConfigError):
            return ValueError(f"UCX refused an option of {options}: {error}")
        return RuntimeError(f"UCX did not start with options {options}: {error}")

    def _turn(self) -> bool:
        """Does all there is to do; returns whether there was anything."""
        self.ucp.progress()
        worked = self._complete_finished()
        worked |= self._dispatch_messages()
        worked |= self._run_commands()
        worked |= self._run_timers()
        if worked:
            self._busy_poll_until = time.monotonic() + self._settings.effective_busy_poll_seconds
        return worked

    def _sleep(self, poller: select.epoll) -> None:
        now = time.monotonic()
        if now < self._busy_poll_until:
            return
        # arm() is False while events are pending; only an armed worker wakes its descriptor.
        if not self.ucp.arm() or self._commands:
            return
        next_timer = self._timers[0][0] if self._timers else now + _MAX_SLEEP_SECONDS
        poller.poll(min(max(next_timer - now, 0.0), _MAX_SLEEP_SECONDS))

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

    def _run_timers(self) -> bool:
        now = time.monotonic()
        fired = False
        while self._timers and self._timers[0][0] <= now:
            _, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                fired = True
                self._guard(timer.callback)
        return fired

    def _complete_finished(self) -> bool:
        finished = [entry for entry in self._in_flight if entry.request.completed]
        if finished:
            gone = {id(entry) for entry in finished}
            self._in_flight = [entry for entry in self._in_flight if id(entry) not in gone]
        for entry in finished:
            self._complete(entry)
        return bool(finished)

    def _complete(self, entry: _InFlight) -> None:
        error: Exception | None = None
        try:
            entry.request.check_error()
        except UCX_ERRORS as caught:
            error = caught
        self._guard(lambda: entry.on_complete(error))

    def _dispatch_messages(self) -> bool:
        found = False
        while (message := self.ucp.tag_probe(_ANY_TAG, _ANY_TAG_MASK, True)).matched:
            found = True
            self._guard(lambda arrived=message: self._on_message(arrived))  # type: ignore[misc]
        return found

    def _guard(self, action: Callable[[], None]) -> None:
        """Runs ``action``; one faulty callback must not end the thread that all others need."""
        try:
            action()
        except Exception:
            logger.exception("unexpected error on the ucxx owner thread")

    def _begin_stop(self, timeout_seconds: float) -> None:
        self._stop_deadline = time.monotonic() + timeout_seconds
        self.call_at(self._stop_deadline, lambda: None)

    def _may_stop(self) -> bool:
        if self._stop_deadline is None:
            return False
        idle = not self._in_flight and not self._commands
        return idle or time.monotonic() >= self._stop_deadline

    def _shut_down(self) -> None:
        with self._wakeup_lock:
            os.close(self._wakeup_descriptor)
            self._wakeup_descriptor = -1
        self._commands.clear()
        self._timers.clear()
        if self._in_flight:
            # Destroying the worker now could hang or free memory that UCX still writes to.
            logger.error("%d UCX requests never completed; keeping UCX alive", len(self._in_flight))
            _ABANDONED.append((self.ucp, self._in_flight))
        self.ucp = None


_ABANDONED: list[object] = []
