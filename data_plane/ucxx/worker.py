"""The thread that owns a UCX worker: nothing else ever calls UCX.

It sleeps in epoll on the worker's descriptor and on an eventfd for commands.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from ucxx._lib import libucxx
from ucxx._lib.arr import Array

from data_plane.owner_thread import OwnerThread
from data_plane.process_sockets import listening_ports
from data_plane.ucxx.settings import UcxxSettings
from data_plane.ucxx.shared_memory import SharedMemoryCheck

logger = logging.getLogger(__name__)

UCX_ERRORS = (libucxx.UCXError, RuntimeError)
"""One cause gives several classes, some of them plain RuntimeErrors from C++."""

_ANY_TAG = libucxx.UCXXTag(0)
_ANY_TAG_MASK = libucxx.UCXXTagMask(0)
_RETIRE_SECONDS = 0.2
_PAUSE_SECONDS = 5e-6
"""Between GPUs 20% faster for a tick of 64 MiB messages than without."""


@dataclass(slots=True)
class _InFlight:
    """A UCX request with all it needs: a request does not keep its own memory alive."""

    request: Any
    memory: object
    on_complete: Callable[[Exception | None], None]


class UcxxWorker(OwnerThread):
    """Owns a UCX context and worker.

    Args:
        settings: how to use UCX.
        on_deaf: called when the worker gets nothing over shared memory any more. It is to close
            everything that uses the worker, and then to call :meth:`replace`.
        on_message: called with each arrived tag message (a ``TagProbeResult`` whose handle must
            be received or discarded). Matching messages here instead of posting receives to UCX
            shows their length before a byte is written, and leaves an offer that nothing came
            for with no trace in UCX.

    Attributes:
        ports: TCP ports that UCX has opened by itself; another thread of the process may have
            opened one of them meanwhile.
    """

    def __init__(
        self,
        settings: UcxxSettings,
        on_message: Callable[[Any], None],
        on_deaf: Callable[[], None],
    ) -> None:
        super().__init__(
            "ucxx-owner",
            pause_seconds=_PAUSE_SECONDS,
            busy_poll_seconds=settings.effective_busy_poll_seconds,
        )
        self._settings = settings
        self._on_message = on_message
        self._on_deaf = on_deaf
        self._check: SharedMemoryCheck | None = None
        self._poller: select.epoll | None = None
        self._in_flight: list[_InFlight] = []
        self.ucp: Any = None
        self.ports: frozenset[int] = frozenset()

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
        """Frees an arrived message that nobody wants, however long it is.

        UCX can only free it by receiving it. Into memory that is too short for it, it moves nothing
        and the sender sees all as done.
        """
        memory = np.empty(1, dtype=np.uint8)
        request = self.ucp.tag_recv_with_handle(Array(memory), message)
        self.track(request, memory, lambda error: None)

    def check_shared_memory(self) -> None:
        """Finds out whether a peer that has just been lost took the others with it, where they
        write to this worker through shared memory."""
        if not self._settings.one_host or self._check is not None:
            return
        try:
            check = SharedMemoryCheck(self.ucp)
        except UCX_ERRORS as error:
            logger.warning("whether shared memory still works cannot be checked: %s", error)
            return
        self._check = check
        self.call_when(check.look, lambda: self._end_check(check))

    def replace(self) -> None:
        """Goes on with a new UCX worker. The caller has closed every connection and listener."""
        deadline = time.monotonic() + _RETIRE_SECONDS
        while self._in_flight and time.monotonic() < deadline:
            self.ucp.progress()
            self._complete_finished()
        assert self._poller is not None
        self._poller.unregister(self.ucp.epoll_file_descriptor)
        self._abandon_unfinished()
        self._open(self._poller)

    def _end_check(self, check: SharedMemoryCheck) -> None:
        self._check = None
        check.close()
        if check.deaf:
            self._on_deaf()

    def _open(self, poller: select.epoll) -> None:
        options = self._settings.context_options()
        try:
            self._start_ucx(options)
        except Exception as error:
            raise _explain_start(error, options) from error
        self._poller = poller
        poller.register(self.ucp.epoll_file_descriptor, select.EPOLLIN)

    def _start_ucx(self, options: dict[str, str]) -> None:
        if self._settings.on_gpu:
            import torch

            # UCX looks for the thread's CUDA context when it opens its CUDA transports.
            torch.cuda.set_device(torch.device(self._settings.device))
            torch.zeros(1, device=self._settings.device)
        # Importing ucxx sets this variable. UCX reads it, if at all, while it is loaded, and would
        # warn about it from now on.
        os.environ.pop("UCX_MEMTYPE_CACHE", None)
        before = listening_ports()
        feature = libucxx.Feature
        context = libucxx.UCXContext(options, (feature.TAG, feature.STREAM, feature.WAKEUP))
        self.ucp = libucxx.UCXWorker(context)
        self.ucp.init_blocking_progress_mode()
        self.ports = listening_ports() - before

    def _progress(self) -> bool:
        self.ucp.progress()
        worked = self._complete_finished()
        worked |= self._dispatch_messages()
        return worked

    def _is_moving(self) -> bool:
        return bool(self._in_flight)

    def _may_sleep(self) -> bool:
        # arm() is False while events are pending; only an armed worker wakes its descriptor.
        return bool(self.ucp.arm())

    def _is_quiet(self) -> bool:
        return not self._in_flight

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
            if self._check is not None and message.sender_tag.value == self._check.tag:
                self._check.arrive()
                self.discard(message)
                continue
            self._guard(lambda arrived=message: self._on_message(arrived))  # type: ignore[misc]
        return found

    def _shut_down(self) -> None:
        if self._check is not None:
            self._check.close()
            self._check = None
        self._abandon_unfinished()

    def _abandon_unfinished(self) -> None:
        if self._in_flight:
            # Destroying the worker now could hang or free memory that UCX still writes to.
            logger.error("%d UCX requests never completed; keeping UCX alive", len(self._in_flight))
            _ABANDONED.append((self.ucp, self._in_flight))
            self._in_flight = []
        self.ucp = None


def _explain_start(error: Exception, options: dict[str, str]) -> Exception:
    if isinstance(error, libucxx.UCXConfigError):
        return ValueError(f"UCX refused an option of {options}: {error}")
    return RuntimeError(f"UCX did not start with options {options}: {error}")


_ABANDONED: list[object] = []
