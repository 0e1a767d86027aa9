"""Changes rows on their way: what somebody between two hosts does who can read UCX's TCP streams.

UCX's stream is a magic number of 8 bytes from whoever connects, and then messages: an id (1 byte),
a length (4 bytes, little-endian) and so many bytes; one id stands for bytes of memory behind it,
whose length it says. Only bytes in the middle of long messages are changed, which rows alone are,
and TCP's checksum is made right, so nothing below notices.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

_ETHERNET_BYTES = 14
_MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
_HEADER = struct.Struct("<BI")
_PUT = struct.Struct("<QQI")
_PUT_ID = 33
_SYN, _RST = 0x02, 0x04
_LONG_BYTES = 4096
_MARGIN_BYTES = 512
"""Before it lie headers of UCX's upper layers, and those of our own messages."""
_CHANGED_BYTES = 64
_LOWEST_BIT = 1

Flow = tuple[bytes, bytes, bytes]
"""Both addresses and both ports, in the direction of travel."""


class _NotUcx(Exception):
    """The stream is none of UCX's."""


@dataclass
class _Stream:
    """One direction of a connection.

    Attributes:
        expected: sequence number of the next byte.
        head: of a message, as far as it has come.
        left: bytes of the present message's body that are to come.
        length: of that body.
        then_put: the body tells how many bytes of memory follow.
        begun: the magic number has come, or none will.
        early: what came before something that was lost, by sequence number.
    """

    expected: int
    head: bytearray = field(default_factory=bytearray)
    left: int = 0
    length: int = 0
    then_put: bool = False
    begun: bool = False
    early: dict[int, bytes] = field(default_factory=dict)

    def follow(self, sequence: int, payload: bytes) -> list[tuple[int, int]]:
        """Takes a segment; half-open ranges in it that are rows, if it is the next one.

        Raises:
            _NotUcx: the stream is none of UCX's.
        """
        ahead = (sequence - self.expected) % 2**32
        if ahead >= 2**31:
            # Sent again, perhaps together with more.
            known = 2**32 - ahead
            if known < len(payload):
                self.follow(self.expected, payload[known:])
            return []
        if ahead:
            self.early[sequence] = payload
            return []
        self.expected = (sequence + len(payload)) % 2**32
        rows = self.find_rows(payload)
        for each in [each for each in self.early if (each - self.expected) % 2**32 >= 2**31]:
            self.follow(each, self.early.pop(each, b""))
        if self.expected in self.early:
            self.follow(self.expected, self.early.pop(self.expected))
        return rows

    def find_rows(self, payload: bytes) -> list[tuple[int, int]]:
        """Follows the stream through ``payload``; half-open ranges in it that are rows."""
        rows, at = [], 0
        while at < len(payload):
            if self.left and not self.then_put:
                taken = min(self.left, len(payload) - at)
                if self.length >= _LONG_BYTES:
                    begin = at + max(0, _MARGIN_BYTES - (self.length - self.left))
                    end = at + min(taken, self.left - _MARGIN_BYTES)
                    if begin < end:
                        rows.append((begin, end))
                self.left -= taken
                at += taken
                continue
            wanted = self._head_bytes() - len(self.head)
            self.head += payload[at : at + wanted]
            at += wanted
            if len(self.head) == self._head_bytes():
                self._take_head(bytes(self.head))
                self.head.clear()
        return rows

    def _head_bytes(self) -> int:
        if not self.begun:
            return len(_MAGIC)
        return self.left if self.then_put else _HEADER.size

    def _take_head(self, head: bytes) -> None:
        if not self.begun:
            if head != _MAGIC:
                raise _NotUcx
            self.begun = True
        elif self.then_put:
            _, self.length, _ = _PUT.unpack(head)
            self.left, self.then_put = self.length, False
        else:
            message, self.length = _HEADER.unpack(head)
            self.left, self.then_put = self.length, message == _PUT_ID
            if self.then_put and self.length != _PUT.size:
                raise _NotUcx


class RowChanger:
    """Follows every stream of UCX that passes, from its beginning."""

    def __init__(self) -> None:
        self._streams: dict[Flow, _Stream] = {}

    def pass_on(self, frame: bytes, *, change: bool) -> bytes:
        """The frame as it goes on; another one if there are rows in it and they are to change."""
        if len(frame) < _ETHERNET_BYTES + 40 or frame[12:14] != b"\x08\x00" or frame[23] != 6:
            return frame
        ip_bytes = (frame[_ETHERNET_BYTES] & 0xF) * 4
        tcp_at = _ETHERNET_BYTES + ip_bytes
        (ip_length,) = struct.unpack_from("!H", frame, _ETHERNET_BYTES + 2)
        end = _ETHERNET_BYTES + ip_length
        (sequence,) = struct.unpack_from("!I", frame, tcp_at + 4)
        body_at = tcp_at + (frame[tcp_at + 12] >> 4) * 4
        flags = frame[tcp_at + 13]
        source, target = frame[26:30], frame[30:34]
        ports = frame[tcp_at : tcp_at + 2], frame[tcp_at + 2 : tcp_at + 4]
        flow, back = (source, target, b"".join(ports)), (target, source, b"".join(ports[::-1]))
        if flags & _SYN:
            # Whoever answers a connection sends no magic.
            stream = _Stream((sequence + 1) % 2**32, begun=back in self._streams)
            self._streams[flow] = stream
            return frame
        known = self._streams.get(flow)
        if known is None or flags & _RST:
            self._streams.pop(flow, None)
            return frame
        if body_at == end:
            return frame
        try:
            rows = known.follow(sequence, frame[body_at:end])
        except _NotUcx:
            for each in (flow, back):
                self._streams.pop(each, None)
            return frame
        if not rows or not change:
            return frame
        begin, stop = max(rows, key=lambda each: each[1] - each[0])
        if stop - begin < _CHANGED_BYTES:
            return frame
        changed = bytearray(frame[:end])
        middle = body_at + (begin + stop - _CHANGED_BYTES) // 2
        for at in range(middle, middle + _CHANGED_BYTES):
            changed[at] ^= _LOWEST_BIT
        _seal(changed, tcp_at)
        return bytes(changed)


def _seal(frame: bytearray, tcp_at: int) -> None:
    """Makes TCP's checksum right."""
    struct.pack_into("!H", frame, tcp_at + 16, 0)
    segment = bytes(frame[tcp_at:])
    pseudo = bytes(frame[26:34]) + struct.pack("!BBH", 0, 6, len(segment))
    whole = pseudo + segment + bytes(len(segment) % 2)
    total = sum(struct.unpack(f"!{len(whole) // 2}H", whole))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into("!H", frame, tcp_at + 16, ~total & 0xFFFF)
