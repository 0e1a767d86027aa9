"""The first words on a connection, whatever carries them.

The listener speaks first, with a challenge; the client answers with its hello, and the listener
accepts or refuses. Each is a header of 16 bytes (magic with the version, a status, the length of
what follows) and then at most MAX_BODY_BYTES.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from data_plane.transport import MAX_HELLO_BYTES

_HEADER = struct.Struct("!8sII")
_MAGIC = b"DISTCA\x00\x04"

HEADER_BYTES: Final = _HEADER.size
MAX_BODY_BYTES: Final = MAX_HELLO_BYTES + 512
"""A hello or an answer, with nonce, addresses and proof."""


class GreetingKind(IntEnum):
    """The kinds of greetings."""

    CHALLENGE = 0
    HELLO = 1
    ACCEPTED = 2
    REJECTED = 3
    """A refusal by a listener that proves that it knows the secret."""
    REFUSED = 4
    """Without a proof, since the listener does not know what to prove: anybody may say so."""


class BadGreeting(ValueError):
    """The peer's first bytes are not a greeting of this protocol and version."""


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """One of the words.

    Attributes:
        status: which of them.
        body: what it says.
    """

    status: GreetingKind
    body: bytes

    def encode(self) -> bytes:
        return _HEADER.pack(_MAGIC, self.status, len(self.body)) + self.body


@dataclass(frozen=True, kw_only=True)
class Header:
    """The part before the body of a greeting."""

    status: GreetingKind
    body_bytes: int

    def with_body(self, body: bytes) -> Greeting:
        return Greeting(status=self.status, body=body)


def decode_header(raw: bytes) -> Header:
    """Reads HEADER_BYTES.

    Raises:
        BadGreeting: they are none.
    """
    magic, status, body_bytes = _HEADER.unpack(raw)
    if magic != _MAGIC:
        raise BadGreeting(f"starts with {magic!r}, not {_MAGIC!r}: another program or version")
    if status not in set(GreetingKind):
        raise BadGreeting(f"status {status} is none of {[int(s) for s in GreetingKind]}")
    if body_bytes > MAX_BODY_BYTES:
        raise BadGreeting(f"announces {body_bytes} bytes, MAX_BODY_BYTES={MAX_BODY_BYTES}")
    return Header(status=GreetingKind(status), body_bytes=body_bytes)
