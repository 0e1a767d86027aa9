"""A peer in a process of its own, which a test may kill or stop.

It makes a transport, listens and obeys each client's hello: a JSON list of steps such as
``["put", tag, nbytes]`` or ``["offer", tag, nbytes]``.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe

import psutil

from data_plane.buffer_pool import BufferPool
from data_plane.transport import Address, Connection
from tests.service.data_plane.secret import proven
from tests.support.forkserver import forkserver

FILL = 7
"""Value of every byte that a peer puts."""

_START_SECONDS = 100.0
"""The first one waits for the libraries, on a busy machine."""
_LIFETIME_SECONDS = 120.0
_STOP_SECONDS = 5.0


class PeerProcess:
    """A running peer; ``address`` is where it listens.

    Args:
        factory: ``module:function`` that makes its transport.
    """

    def __init__(self, factory: str) -> None:
        context = forkserver("nixl" if ".nixl." in factory else "ucxx")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(factory, theirs), daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(_START_SECONDS):
            self.end()
            raise RuntimeError(f"the peer did not start within {_START_SECONDS} s")
        self.address = Address("127.0.0.1", self._pipe.recv())

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """Returns when all its threads have stopped, which takes a while on a busy machine."""
        self._signal(signal.SIGSTOP)
        process = psutil.Process(self._process.pid)
        deadline = time.monotonic() + _STOP_SECONDS
        while process.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.0005)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.join(10.0)
        self._process.close()
        self._pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


@contextmanager
def running_peer(factory: str) -> Iterator[PeerProcess]:
    peer = PeerProcess(factory)
    try:
        yield peer
    finally:
        peer.end()


def steps(*step: tuple[str, int, int]) -> bytes:
    """A hello that makes the peer obey."""
    return json.dumps(step).encode()


def serve(factory: str, pipe: Pipe) -> None:
    """Runs in the peer's process until the test's process is gone."""
    module, _, function = factory.partition(":")
    transport = getattr(importlib.import_module(module), function)()
    pool = BufferPool()

    def obey(hello: bytes, connection: Connection) -> bytes:
        for kind, tag, nbytes in json.loads(hello or b"[]"):
            buffer = pool.acquire(nbytes)
            buffer.tensor.fill_(FILL)
            getattr(connection, kind)(tag, buffer, 60.0)
            buffer.release()
        return b"ok"

    pipe.send(transport.listen("127.0.0.1", 0, proven(obey)).port)
    # Readable when the test's process closes its end, also by dying.
    pipe.poll(_LIFETIME_SECONDS)
    transport.close()
