"""TCP sockets of this process, whichever library opened them: UCX hands out none of its own.

Linux lists a process's files in ``/proc/self/fd``; a copy of a descriptor is the same socket.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

_FILES: Final = "/proc/self/fd"
_RECEIVED_BYTES = struct.Struct("=128xQ")
"""``tcpi_bytes_received`` of ``struct tcp_info`` (linux/tcp.h)."""


@dataclass(frozen=True)
class Accepted:
    """A connection that this process has accepted.

    Attributes:
        inode: no other socket has it while this one is open.
        port: at which.
        peer: IP address and port of the other side.
        received_bytes: how many bytes have come, read or not.
        descriptor: was its own when it was seen; it may have become another file's.
    """

    inode: str
    port: int
    peer: tuple[str, int]
    received_bytes: int = field(compare=False)
    descriptor: int = field(compare=False)

    def shut_down(self) -> None:
        """Ends the connection both ways, so that its reader closes it."""
        with _copy_of(self.descriptor) as copy, suppress(OSError):
            if copy is not None and _is_inode(copy, self.inode):
                copy.shutdown(socket.SHUT_RDWR)


def count_files() -> int:
    """How many files this process has open."""
    # Linux tells since 6.2; 0 before.
    return os.stat(_FILES).st_size or len(os.listdir(_FILES))


def listening_ports() -> frozenset[int]:
    """The TCP ports that this process listens on, at any IPv4 address."""
    ports = set()
    for descriptor in _descriptors():
        with _copy_of(descriptor) as candidate:
            if candidate is not None and _listens(candidate):
                ports.add(candidate.getsockname()[1])
    return frozenset(ports)


def listener_on(ip: str | None, port: int) -> socket.socket:
    """A copy of this process's listener on ``port`` at ``ip`` (None: at any address), to be closed
    by the caller.
    """
    for descriptor in _descriptors():
        with _copy_of(descriptor) as candidate:
            if candidate is None or not _listens(candidate):
                continue
            bound_ip, bound_port = candidate.getsockname()
            if bound_port == port and ip in (None, bound_ip):
                # socket.dup() would make the listener, too, wait where UCX expects it not to.
                return socket.socket(fileno=os.dup(candidate.fileno()))
    raise OSError(f"this process has no listener on {ip or 'any address'}:{port}")


class AcceptedSockets:
    """Finds connections that this process has accepted, and looks at each that is of no interest
    once only."""

    def __init__(self) -> None:
        self._dismissed: set[str] = set()

    def find(self, interesting: Callable[[Accepted], bool]) -> list[Accepted]:
        """Those that are ``interesting``, which is not asked again about the others."""
        found: dict[Accepted, None] = {}
        dismissed = set()
        for descriptor in _descriptors():
            try:
                inode = os.readlink(f"{_FILES}/{descriptor}")
            except OSError:
                continue
            if not inode.startswith("socket:"):
                continue
            if inode not in self._dismissed:
                with _copy_of(descriptor) as copy:
                    if copy is None or not _is_inode(copy, inode):
                        continue
                    accepted = _accepted(copy, inode, descriptor)
                if accepted is not None and interesting(accepted):
                    found[accepted] = None
                    continue
            dismissed.add(inode)
        self._dismissed = dismissed
        return list(found)

    def forget(self) -> None:
        """Looks at all of them again."""
        self._dismissed = set()


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir(_FILES)]


@contextmanager
def _copy_of(descriptor: int) -> Iterator[socket.socket | None]:
    """The same socket under another descriptor; None if it is none, or closed meanwhile."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        yield None
        return
    try:
        opened = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        yield None
        return
    with opened:
        yield opened


def _is_inode(copy: socket.socket, inode: str) -> bool:
    return inode == f"socket:[{os.fstat(copy.fileno()).st_ino}]"


def _is_tcp(candidate: socket.socket) -> bool:
    return candidate.family == socket.AF_INET and candidate.type == socket.SOCK_STREAM


def _listens(candidate: socket.socket) -> bool:
    return _is_tcp(candidate) and bool(
        candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )


def _accepted(connection: socket.socket, inode: str, descriptor: int) -> Accepted | None:
    if not _is_tcp(connection):
        return None
    try:
        port, peer = connection.getsockname()[1], connection.getpeername()[:2]
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_BYTES.size)
        (received_bytes,) = _RECEIVED_BYTES.unpack(info)
    except (OSError, struct.error):
        return None
    return Accepted(inode, port, peer, received_bytes, descriptor)
