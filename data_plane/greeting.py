"""The first words on a connection, whatever carries them.

Either side sends a header of 20 bytes (magic with the version, its connection id, a status, the
length of what follows) and then at most MAX_HELLO_BYTES.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from data_plane.transport import MAX_HELLO_BYTES, AcceptCallback

if TYPE_CHECKING:
    from data_plane.base_connection import BaseConnection

logger = logging.getLogger(__name__)

MAX_CONNECTION_ID: Final = 2**31 - 1

_HEADER = struct.Struct("!8sIII")
_MAGIC = b"DISTCA\x00\x01"

HEADER_BYTES: Final = _HEADER.size


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
class Header:
    """What comes before the body of a greeting."""

    status: Status
    connection_id: int
    body_bytes: int

    def with_body(self, body: bytes) -> Greeting:
        return Greeting(status=self.status, connection_id=self.connection_id, body=body)


def decode_header(raw: bytes) -> Header:
    """Reads HEADER_BYTES.

    Raises:
        BadGreeting: they are none.
    """
    magic, connection_id, status, body_bytes = _HEADER.unpack(raw)
    if magic != _MAGIC:
        raise BadGreeting(f"starts with {magic!r}, not {_MAGIC!r}: another program or version")
    if connection_id > MAX_CONNECTION_ID:
        raise BadGreeting(f"connection id {connection_id} is over {MAX_CONNECTION_ID}")
    if status not in set(Status):
        raise BadGreeting(f"status {status} is none of {[int(s) for s in Status]}")
    if body_bytes > MAX_HELLO_BYTES:
        raise BadGreeting(f"announces {body_bytes} bytes, MAX_HELLO_BYTES={MAX_HELLO_BYTES}")
    return Header(status=Status(status), connection_id=connection_id, body_bytes=body_bytes)


def judge(
    accept: AcceptCallback, hello: Greeting, connection: BaseConnection
) -> tuple[Status, bytes]:
    """Asks ``accept`` about a client's hello; returns the status and the body of the answer."""
    if hello.status is not Status.HELLO:
        return Status.REJECTED, f"expected a hello, got {hello.status.name}".encode()
    try:
        answer = accept(hello.body, connection)
    except ValueError as refusal:
        return Status.REJECTED, str(refusal).encode()[:MAX_HELLO_BYTES]
    except Exception:
        logger.exception("accept callback failed for %s", connection.peer)
        return Status.REJECTED, b"internal error of the listener, see its log"
    if len(answer) > MAX_HELLO_BYTES:
        logger.error("accept callback answered %d bytes to %s", len(answer), connection.peer)
        return Status.REJECTED, b"the listener's answer is too long"
    return Status.ACCEPTED, answer
