"""The TCP link beside nixl: greetings, offers, and the news of writes, as small frames.

nixl is one-sided and has no failure detector of its own. The link shows each side what the other
offers and when its bytes are there, and it ends when the other process ends, at once.

A frame is a kind (1 byte), a length (4 bytes, big-endian), a code that shows whose it is
(``data_plane.nixl.frame_mac``) and so many bytes.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from data_plane.greeting import HEADER_BYTES, Greeting, decode_header
from data_plane.nixl.frame_mac import MAC_BYTES, FrameMac

if TYPE_CHECKING:
    from data_plane.nixl.worker import NixlWorker

MAX_FRAME_BYTES: Final = 2**20
_READ_BYTES = 2**18
_FRAME = struct.Struct("!BI")
_USER_TIMEOUT_MILLISECONDS = 10_000


class FrameKind(IntEnum):
    """The kinds of frames."""

    REGION = 1
    OFFER = 2
    BEGIN = 3
    DONE = 4
    SIZE = 5
    CONTROL = 6
    SKIP = 7
    AGENT = 8
    MET = 9


class BadFrame(ValueError):
    """The peer's bytes are no frame of this protocol."""


class UnprovenFrame(BadFrame):
    """A frame does not carry the connection's key, or is not the next one."""


def encode_frame(kind: FrameKind, payload: bytes, sending: FrameMac) -> bytes:
    """The bytes of the next frame."""
    head = _FRAME.pack(kind, len(payload))
    return head + sending.next(head, payload) + payload


class NixlLink:
    """One non-blocking socket, driven by the owner thread; every method is for that thread.

    Args:
        worker: watches when the socket can be read or written.
        connection: a connected socket; the link closes it.
        on_frame: takes each frame; raises BadFrame for one that makes no sense.
        on_bad: called, once, for a greeting or frame that makes no sense; nothing more is read.
        on_ended: called once, when the peer will send nothing more: with None if it said so, that
            is, it ended the link or its process ended; else with the error.
    """

    def __init__(
        self,
        worker: NixlWorker,
        connection: socket.socket,
        on_frame: Callable[[FrameKind, bytes], None],
        on_bad: Callable[[ValueError], None],
        on_ended: Callable[[Exception | None], None],
    ) -> None:
        self._worker = worker
        self._socket: socket.socket | None = connection
        self._on_frame = on_frame
        self._on_bad = on_bad
        self._on_ended = on_ended
        self._on_greeting: Callable[[Greeting], None] | None = None
        self._sending: FrameMac | None = None
        self._receiving: FrameMac | None = None
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._started = False
        self._readable = True
        self._good = True
        self._finishing = False
        self._on_finished: Callable[[], None] | None = None
        prepare(connection)

    def expect_greeting(self, on_greeting: Callable[[Greeting], None]) -> None:
        """Calls ``on_greeting`` with the next greeting of the peer; with the first call, begins to
        read."""
        self._on_greeting = on_greeting
        if self._socket is not None and not self._started:
            self._started = True
            self._worker.watch(self._socket, select.EPOLLIN, self._on_events)

    def begin(self, sending: bytes, receiving: bytes) -> None:
        """Lets frames travel, which prove by the keys of both directions whose they are."""
        self._sending = FrameMac(sending)
        self._receiving = FrameMac(receiving)

    @property
    def finished(self) -> bool:
        """Returns whether this side has said that it sends nothing more."""
        return self._socket is None or (self._finishing and not self._outgoing)

    def send(self, kind: FrameKind, payload: bytes) -> None:
        """Sends a frame, now or as soon as the network takes it; nothing before the handshake is
        over."""
        if self._sending is not None and self._socket is not None and not self._finishing:
            self.send_raw(encode_frame(kind, payload, self._sending))

    def send_raw(self, raw: bytes) -> None:
        """Sends bytes."""
        if self._socket is None or self._finishing:
            return
        self._outgoing += raw
        self._flush()

    def finish(self, on_finished: Callable[[], None]) -> None:
        """Sends nothing more: the peer's link ends once it has read the rest.

        Args:
            on_finished: called when the rest has been handed to the network.
        """
        self._on_finished = on_finished
        self._finishing = True
        self._flush()

    def close(self) -> None:
        """Closes the socket, with whatever was not sent."""
        closing, self._socket = self._socket, None
        if closing is not None:
            self._worker.unwatch(closing)
            closing.close()

    def _on_events(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush()
        if self._readable and events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            self._read()

    def _read(self) -> None:
        assert self._socket is not None
        try:
            received = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            # A reset is the end of the process, or of its side, as clear as a close notice.
            said_so = isinstance(error, ConnectionResetError | BrokenPipeError)
            self._ended(None if said_so else error)
            return
        if not received:
            self._ended(None)
            return
        if self._good:
            self._incoming += received
            self._take()

    def _take(self) -> None:
        taken = 0
        try:
            taken = self._take_all()
        except ValueError as bad:
            self._good = False
            self._incoming.clear()
            self._on_bad(bad)
        del self._incoming[:taken]

    def _take_all(self) -> int:
        """Takes all that is complete; returns how many bytes that was.

        Raises:
            ValueError: the peer's bytes make no sense.
        """
        taken = 0
        while self._socket is not None:
            if self._on_greeting is not None:
                length = self._take_greeting(taken)
            else:
                length = self._take_frame(taken)
            if length == 0:
                break
            taken += length
        return taken

    def _take_greeting(self, begin: int) -> int:
        """Takes a greeting at ``begin``; returns its length, 0 if it is not complete."""
        if len(self._incoming) < begin + HEADER_BYTES:
            return 0
        header = decode_header(bytes(self._incoming[begin : begin + HEADER_BYTES]))
        end = begin + HEADER_BYTES + header.body_bytes
        if len(self._incoming) < end:
            return 0
        on_greeting, self._on_greeting = self._on_greeting, None
        assert on_greeting is not None
        on_greeting(header.with_body(bytes(self._incoming[begin + HEADER_BYTES : end])))
        return end - begin

    def _take_frame(self, begin: int) -> int:
        """Takes a frame at ``begin``; returns its length, 0 if it is not complete."""
        if self._receiving is None:
            # A peer that was refused has nothing to say.
            return len(self._incoming) - begin
        if len(self._incoming) < begin + _FRAME.size + MAC_BYTES:
            return 0
        kind, length = _FRAME.unpack_from(self._incoming, begin)
        if kind not in set(FrameKind) or length > MAX_FRAME_BYTES:
            raise BadFrame(f"kind {kind}, {length} bytes")
        mac_at = begin + _FRAME.size
        payload_at = mac_at + MAC_BYTES
        end = payload_at + int(length)
        if len(self._incoming) < end:
            return 0
        head = bytes(self._incoming[begin:mac_at])
        payload = bytes(self._incoming[payload_at:end])
        if not self._receiving.is_next(head, payload, bytes(self._incoming[mac_at:payload_at])):
            raise UnprovenFrame(f"{FrameKind(kind).name} of {length} bytes without the right code")
        self._on_frame(FrameKind(kind), payload)
        return end - begin

    def _flush(self) -> None:
        if self._socket is None:
            return
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            # Reading tells what has happened.
            self._outgoing.clear()
        self._watch()
        on_finished = self._on_finished
        if self._finishing and not self._outgoing and on_finished is not None:
            self._on_finished = None
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
            on_finished()

    def _watch(self) -> None:
        assert self._socket is not None
        events = (select.EPOLLIN if self._readable else 0) | (
            select.EPOLLOUT if self._outgoing else 0
        )
        self._worker.rewatch(self._socket, events)

    def _ended(self, error: Exception | None) -> None:
        self._readable = False
        self._watch()
        self._on_ended(error)


def prepare(connection: socket.socket) -> None:
    """Sets what finds a cut link within seconds, and sends frames at once."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MILLISECONDS),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    _SOCKETS.add(connection)


_SOCKETS: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    # A child would hold the link up after this process has ended, and nobody would notice.
    for each in list(_SOCKETS):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)
