"""Addresses and ports of the machine that the tests run on."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

import psutil
import pytest


def foreign_address() -> str:
    """An IPv4 address of this machine on another interface than the loopback one; skips without."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return str(each.address)
    pytest.skip("this machine has the loopback interface alone")


def unused_port(n: int = 1) -> int:
    """The first of ``n`` in a row that were free a moment ago, for what listens there now or comes
    back to it. None is one of those that the kernel gives to outgoing connections, of which one
    could have it meanwhile."""
    below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        first = random.randrange(below // 2, below - n)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + n):
                probes.enter_context(socket.create_server(("", port)))
            return first
