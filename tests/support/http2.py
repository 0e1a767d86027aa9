"""HTTP/2 by hand, for what no gRPC client does: names that are no text, readers that take nothing,
calls that are reset as soon as they are made (RFC 9113, 7541)."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_INITIAL_WINDOW_SIZE = 4
_CANCEL = 8
_FRAME_HEAD_BYTES = 9


def preface(*, window_bytes: int | None = None) -> bytes:
    """What a client says first; with ``window_bytes``, how much it takes of each call's answer."""
    settings = (
        b"" if window_bytes is None else struct.pack("!HI", _INITIAL_WINDOW_SIZE, window_bytes)
    )
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings)


def headers(
    path: bytes,
    stream: int = 1,
    *,
    scheme: bytes = b"http",
    metadata: Mapping[bytes, bytes] = MappingProxyType({}),
) -> bytes:
    """Begins a gRPC call of ``path``; clients' streams have odd numbers."""
    fields = {
        b":method": b"POST",
        b":scheme": scheme,
        b":path": path,
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
        **metadata,
    }
    # Literal fields without indexing, with names and values shorter than 127 bytes.
    block = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in fields.items()
    )
    return _frame(_HEADERS, _END_HEADERS, stream, block)


def message(request: bytes, stream: int = 1) -> bytes:
    """The one message of a call, below 16 KiB."""
    return _frame(_DATA, _END_STREAM, stream, struct.pack("!BI", 0, len(request)) + request)


def reset(stream: int) -> bytes:
    """Cancels a call."""
    return _frame(_RESET, 0, stream, struct.pack("!I", _CANCEL))


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return struct.pack("!I", len(content))[1:] + struct.pack("!BBI", kind, flags, stream) + content


@dataclass
class Http2Client:
    """A connection to a gRPC server, with mTLS; it reads nothing unless asked.

    Args:
        address: ``host:port``.
        ca_file, certificate_file, key_file: PEM.
        window_bytes: as of :func:`preface`.
    """

    address: str
    ca_file: Path
    certificate_file: Path
    key_file: Path
    window_bytes: int | None = None
    _next_stream: int = field(default=1, init=False)
    _server_takes_bytes: int = field(default=2**16 - 1, init=False)

    def __enter__(self) -> Http2Client:
        context = ssl.create_default_context(cafile=str(self.ca_file))
        context.load_cert_chain(self.certificate_file, self.key_file)
        context.set_alpn_protocols(["h2"])
        host, _, port = self.address.rpartition(":")
        line = socket.create_connection((host, int(port)), 10.0)
        self._line = context.wrap_socket(line, server_hostname="localhost")
        self._line.sendall(preface(window_bytes=self.window_bytes))
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def call(self, path: str, request: bytes, **metadata: bytes) -> int:
        """Makes a call and does not wait for its answer; returns its stream."""
        stream, raw = self._begin(path, request, metadata)
        self._line.sendall(raw)
        return stream

    def reset(self, stream: int) -> None:
        """Cancels a call."""
        self._line.sendall(reset(stream))

    def is_answered(self, stream: int) -> bool:
        """Reads until the server has begun to answer a call, or has reset it."""
        while True:
            kind, of = self._read_frame()
            if of == stream and kind in (_HEADERS, _RESET):
                return kind == _HEADERS

    def _begin(self, path: str, request: bytes, metadata: Mapping[str, bytes]) -> tuple[int, bytes]:
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        named = {name.replace("_", "-").encode(): value for name, value in metadata.items()}
        begun = headers(path.encode(), stream, scheme=b"https", metadata=named)
        sent = message(request, stream)
        self._server_takes_bytes -= len(sent) - _FRAME_HEAD_BYTES
        while self._server_takes_bytes < 0:
            self._read_frame()
        return stream, begun + sent

    def _read_frame(self) -> tuple[int, int]:
        """The kind and the stream of the next frame."""
        head = self._read(_FRAME_HEAD_BYTES)
        length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        stream, content = int.from_bytes(head[5:], "big"), self._read(length)
        if kind == _WINDOW_UPDATE and stream == 0:
            self._server_takes_bytes += int.from_bytes(content, "big")
        # A server that gets no answer to these takes no further calls.
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._line.sendall(_frame(kind, _ACK, 0, content if kind == _PING else b""))
        return kind, stream

    def _read(self, nbytes: int) -> bytes:
        read = b""
        while len(read) < nbytes:
            more = self._line.recv(nbytes - len(read))
            assert more, "the server has closed the connection"
            read += more
        return read
