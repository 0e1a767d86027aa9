"""Addresses and ports of the machine that the tests run on."""

from __future__ import annotations

import socket

import psutil
import pytest


def foreign_address() -> str:
    """An IPv4 address of this machine on another interface than the loopback one; skips without."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return str(each.address)
    pytest.skip("this machine has the loopback interface alone")


def unused_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])
