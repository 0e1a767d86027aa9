"""A peer in a process of its own, which a test may kill or stop.

It makes a transport, listens and obeys each client's hello: a JSON list of steps such as
``["put", tag, nbytes]`` or ``["offer", tag, nbytes]``.
"""

from __future__ import annotations

import importlib
import json
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from data_plane.buffer_pool import BufferPool
from data_plane.transport import Address, Connection
from tests.service.data_plane.secret import proven
from tests.support import preloaded

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
        serving: ``module:function`` that it runs, which gets the factory and a socket: it says its
            port there, and the test's process has gone when that is readable.
    """

    def __init__(self, factory: str, serving: str = f"{__name__}:serve") -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener, TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            self._process = preloaded.start(
                f"from {__name__} import main; main()",
                *(factory, serving, str(listener.getsockname()[1])),
                log=log,
            )
            listener.settimeout(_START_SECONDS)
            self._socket, _ = listener.accept()
            port = self._socket.makefile().readline()
            if not port:
                raise RuntimeError(f"the peer did not listen: {log.read_text()}")
        self.address = Address("127.0.0.1", int(port))

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        """Returns when all its threads have stopped, which takes a while on a busy machine."""
        self._process.send_signal(signal.SIGSTOP)
        process = psutil.Process(self._process.pid)
        deadline = time.monotonic() + _STOP_SECONDS
        while process.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.0005)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.wait(10.0)
        self._socket.close()


@contextmanager
def running_peer(factory: str, serving: str = f"{__name__}:serve") -> Iterator[PeerProcess]:
    peer = PeerProcess(factory, serving)
    try:
        yield peer
    finally:
        peer.end()


def steps(*step: tuple[str, int, int]) -> bytes:
    """A hello that makes the peer obey."""
    return json.dumps(step).encode()


def serve(factory: str, test: socket.socket) -> None:
    """Runs in the peer's process until the test's process is gone."""
    transport = _named(factory)()
    pool = BufferPool()

    def obey(hello: bytes, connection: Connection) -> bytes:
        for kind, tag, nbytes in json.loads(hello or b"[]"):
            buffer = pool.acquire(nbytes)
            buffer.tensor.fill_(FILL)
            getattr(connection, kind)(tag, buffer, 60.0)
            buffer.release()
        return b"ok"

    say_port(test, transport.listen("127.0.0.1", 0, proven(obey)))
    # Readable when the test's process closes its end, also by dying.
    select.select([test], [], [], _LIFETIME_SECONDS)
    transport.close()


def say_port(test: socket.socket, address: Address) -> None:
    test.sendall(b"%d\n" % address.port)


def main() -> None:
    """The program of a peer's process."""
    factory, serving, port = sys.argv[1:]
    with socket.create_connection(("127.0.0.1", int(port))) as test:
        _named(serving)(factory, test)


def _named(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
