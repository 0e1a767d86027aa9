"""TCP connections of strangers to a data port, and how many of them it keeps."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import psutil

LOOPBACK = "127.0.0.1"
WAIT_SECONDS = 20.0


def open_at(port: int) -> int:
    """How many connections to a port this process has open, on the accepting side."""
    return sum(
        each.laddr.port == port and each.status != psutil.CONN_LISTEN and each.fd >= 0
        for each in psutil.Process().net_connections("inet")
    )


def strangers(
    stack: ExitStack, port: int, count: int, beginning: bytes = b"", source: str = LOOPBACK
) -> list[socket.socket]:
    """Connections that send ``beginning`` and nothing more."""
    opened = []
    for _ in range(count):
        line = socket.create_connection((LOOPBACK, port), WAIT_SECONDS, (source, 0))
        stack.enter_context(line)
        line.sendall(beginning)
        opened.append(line)
    return opened


def ended(line: socket.socket) -> bool:
    line.setblocking(False)
    try:
        return line.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
