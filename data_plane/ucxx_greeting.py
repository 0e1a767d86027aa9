"""The first words on a ucxx connection, over UCX's stream API, which belongs to one endpoint.

Tags cannot carry them: UCX matches tags per worker, and before the ids are exchanged nothing tells
two new clients apart. Either side sends a header of 20 bytes (magic with the version, its
connection id, a status, the length of what follows) and then at most MAX_HELLO_BYTES.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from ucxx._lib.arr import Array

from data_plane.transport import MAX_HELLO_BYTES
from data_plane.ucxx_connection import MAX_CONNECTION_ID, UcxxConnection
from data_plane.ucxx_worker import UCX_ERRORS

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("!8sIII")
_MAGIC = b"DISTCA\x00\x01"


class Status(IntEnum):
    """What a greeting says: a client's hello, or the listener's verdict on one."""

    HELLO = 0
    ACCEPTED = 1
    REJECTED = 2


class BadGreeting(ValueError):
    """The peer's first bytes are not a greeting of this protocol and version."""


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """A hello or its answer.

    Attributes:
        status: which of them.
        connection_id: the sender's id of the connection.
        body: hello, answer or reason for the refusal.
    """

    status: Status
    connection_id: int
    body: bytes

    def encode(self) -> bytes:
        header = _HEADER.pack(_MAGIC, self.connection_id, self.status, len(self.body))
        return header + self.body


@dataclass(frozen=True, kw_only=True)
class _Header:
    status: Status
    connection_id: int
    body_bytes: int


def _decode_header(raw: bytes) -> _Header:
    magic, connection_id, status, body_bytes = _HEADER.unpack(raw)
    if magic != _MAGIC:
        raise BadGreeting(f"starts with {magic!r}, not {_MAGIC!r}: another program or version")
    if connection_id > MAX_CONNECTION_ID:
        raise BadGreeting(f"connection id {connection_id} is over {MAX_CONNECTION_ID}")
    if status not in set(Status):
        raise BadGreeting(f"status {status} is none of {[int(s) for s in Status]}")
    if body_bytes > MAX_HELLO_BYTES:
        raise BadGreeting(f"announces {body_bytes} bytes, MAX_HELLO_BYTES={MAX_HELLO_BYTES}")
    return _Header(status=Status(status), connection_id=connection_id, body_bytes=body_bytes)


def send_greeting(
    connection: UcxxConnection, greeting: Greeting, on_sent: Callable[[], None]
) -> None:
    """Sends ``greeting``; a failure to do so fails the connection. Owner thread."""
    memory = np.frombuffer(greeting.encode(), dtype=np.uint8)

    def on_complete(error: Exception | None) -> None:
        if not connection.closed and error is None:
            on_sent()

    _submit(connection, "stream_send", memory, on_complete)


def receive_greeting(
    connection: UcxxConnection,
    on_greeting: Callable[[Greeting], None],
    on_bad: Callable[[BadGreeting], None],
) -> None:
    """Receives one greeting and calls one of the callbacks, or neither when the connection ends
    first. Never holds more than MAX_HELLO_BYTES. Owner thread."""
    head = np.zeros(_HEADER.size, dtype=np.uint8)

    def on_head(error: Exception | None) -> None:
        if connection.closed or error is not None:
            return
        try:
            header = _decode_header(head.tobytes())
        except BadGreeting as bad:
            on_bad(bad)
            return
        body = np.zeros(header.body_bytes, dtype=np.uint8)

        def on_body(error: Exception | None) -> None:
            if connection.closed or error is not None:
                return
            on_greeting(
                Greeting(
                    status=header.status,
                    connection_id=header.connection_id,
                    body=body.tobytes(),
                )
            )

        if header.body_bytes == 0:
            on_body(None)
        else:
            _submit(connection, "stream_recv", body, on_body)

    _submit(connection, "stream_recv", head, on_head)


def _submit(
    connection: UcxxConnection,
    operation: str,
    memory: np.ndarray[tuple[int], np.dtype[np.uint8]],
    on_complete: Callable[[Exception | None], None],
) -> None:
    if connection.endpoint is None:
        return
    try:
        request = getattr(connection.endpoint, operation)(Array(memory))
    except UCX_ERRORS as error:
        # The endpoint's close callback ends the connection.
        logger.debug("%s with %s: %s", operation, connection.peer, error)
        return
    connection.worker.track(request, memory, on_complete)
