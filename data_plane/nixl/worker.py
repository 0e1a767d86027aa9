"""The thread that owns nixl and its links: it polls while bytes move, and sleeps otherwise."""

from __future__ import annotations

import logging
import select
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from data_plane.nixl.agent import NixlAgent, NixlMemory, NixlWrite
from data_plane.nixl.settings import NixlSettings
from data_plane.owner_thread import OwnerThread

logger = logging.getLogger(__name__)

_POLL_SECONDS = 50e-6


@dataclass(eq=False)
class _Write:
    """A write under way, with all it needs."""

    write: NixlWrite
    memory: object
    on_complete: Callable[[Exception | None], None]


class NixlWorker(OwnerThread):
    """Owns nixl's agents, their writes, and the sockets of all links.

    Args:
        settings: how to use nixl.

    Attributes:
        memory: registers buffers.
        lingering: connections that are closed but whose peer may still write to this process, or
            has not got everything.
    """

    memory: NixlMemory

    def __init__(self, settings: NixlSettings) -> None:
        # Without a pause: with one, an all-to-all of 1 GiB between 4 GPUs is a quarter slower.
        super().__init__(
            "nixl-owner", pause_seconds=0.0, busy_poll_seconds=settings.effective_busy_poll_seconds
        )
        self._settings = settings
        self.lingering: set[object] = set()
        self._withheld: list[object] = []
        self._writes: list[_Write] = []
        self._arriving: Counter[NixlAgent] = Counter()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._poller: select.epoll

    def watch(self, connection: socket.socket, events: int, handler: Callable[[int], None]) -> None:
        """Calls ``handler`` with what has happened on a socket."""
        self._handlers[connection.fileno()] = handler
        self._poller.register(connection, events)

    def rewatch(self, connection: socket.socket, events: int) -> None:
        """Watches for other events; nothing for a socket that is not watched."""
        if connection.fileno() in self._handlers:
            self._poller.modify(connection, events)

    def unwatch(self, connection: socket.socket) -> None:
        """Watches no more."""
        if self._handlers.pop(connection.fileno(), None) is not None:
            self._poller.unregister(connection)

    def write(
        self,
        write: NixlWrite,
        memory: object,
        on_complete: Callable[[Exception | None], None],
    ) -> None:
        """Starts ``write``, keeps ``memory`` alive until it is over, and then calls
        ``on_complete(error or None)``."""
        entry = _Write(write, memory, on_complete)
        if not self._advance(entry):
            self._writes.append(entry)

    def expect(self, agent: NixlAgent) -> None:
        """A peer writes to memory of ``agent``, which some networks help along."""
        self._arriving[agent] += 1

    def expect_no_more(self, agent: NixlAgent) -> None:
        """One of those writes is over."""
        self._arriving[agent] -= 1
        if self._arriving[agent] <= 0:
            del self._arriving[agent]

    def withhold(self, memory: object) -> None:
        """Keeps memory that a peer may write to, nobody knows until when."""
        self._withheld.append(memory)

    def _open(self, poller: select.epoll) -> None:
        self._poller = poller
        if self._settings.on_gpu:
            import torch

            # UCX looks for the thread's CUDA context when it opens its CUDA transports.
            torch.cuda.set_device(torch.device(self._settings.device))
            torch.zeros(1, device=self._settings.device)
        self.memory = NixlMemory(self._settings, self.submit)

    def _progress(self) -> bool:
        for agent in list(self._arriving):
            agent.progress()
        worked = self._advance_writes()
        return self._dispatch(self._poller.poll(0.0)) or worked

    def _is_moving(self) -> bool:
        return bool(self._writes or self._arriving)

    def _may_sleep(self) -> bool:
        if self._writes or self._arriving:
            time.sleep(_POLL_SECONDS)
            return False
        return True

    def _on_events(self, events: list[tuple[int, int]]) -> None:
        self._dispatch(events)

    def _is_quiet(self) -> bool:
        return not self._writes and not self.lingering

    def _dispatch(self, events: list[tuple[int, int]]) -> bool:
        worked = False
        for descriptor, event in events:
            handler = self._handlers.get(descriptor)
            if handler is not None:
                worked = True
                self._guard(lambda handler=handler, event=event: handler(event))  # type: ignore[misc]
        return worked

    def _advance_writes(self) -> bool:
        # Callbacks may start further writes, which are new entries of the list.
        under_way = self._writes
        self._writes = []
        left = [entry for entry in under_way if not self._advance(entry)]
        self._writes = left + self._writes
        return len(left) < len(under_way)

    def _advance(self, entry: _Write) -> bool:
        """Returns whether a write is over; then its callback has been called."""
        error: Exception | None = None
        try:
            if not entry.write.done():
                return False
        except self.memory.agent.errors as caught:
            error = caught
        self._guard(lambda: entry.on_complete(error))
        return True

    def _shut_down(self) -> None:
        if self._writes or self.lingering or self._withheld:
            # Memory that is still written or read must not be used for anything else.
            logger.error(
                "%d writes have not ended, and %d peers may still write; keeping nixl alive",
                len(self._writes),
                len(self.lingering),
            )
            _ABANDONED.append((self.memory, self._writes, self.lingering, self._withheld))
        self._handlers.clear()
        del self.memory


_ABANDONED: list[object] = []
