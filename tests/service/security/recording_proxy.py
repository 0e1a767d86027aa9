"""A TCP proxy that remembers what clients sent: real traffic, to be mutated."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

_CONNECT_SECONDS = 10.0


class RecordingProxy:
    """Forwards connections to ``target`` until the process ends or ``close``.

    Args:
        target: host and port.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._recorded: list[bytearray] = []
        self._sockets = ExitStack()
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def recorded(self) -> list[bytes]:
        """What each client has sent, by connection; only where it sent something."""
        return [bytes(each) for each in self._recorded if each]

    def close(self) -> None:
        """Ends all connections."""
        # A thread that accepts holds a listener open; this wakes it.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._sockets.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target, _CONNECT_SECONDS)
                server.settimeout(None)
                self._sockets.callback(client.close)
                self._sockets.callback(server.close)
                record = bytearray()
                self._recorded.append(record)
                for source, sink, kept in ((client, server, record), (server, client, None)):
                    threading.Thread(target=_pump, args=(source, sink, kept), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, record: bytearray | None) -> None:
    with suppress(OSError):
        while data := source.recv(2**16):
            if record is not None:
                record += data
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@contextmanager
def recording(target: tuple[str, int]) -> Iterator[RecordingProxy]:
    """A proxy in front of ``target`` while the block runs."""
    proxy = RecordingProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
