"""A cable between two network namespaces that delays, or changes, what it carries.

Kernels are not always built with netem; a pair of TAP devices and a process that passes frames from
one to the other will do. It carries some ten thousand frames a second, in order.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

from tests import ROOT
from tests.cluster.chaos.row_changer import RowChanger

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
FRAME_BYTES = 65536
READY_SECONDS = 20.0
_ORDER = struct.Struct("dII")
"""Seconds that every frame takes from now on, and how many more of either end's are to be
changed."""

End = tuple[str, str]
"""A namespace and the name of the device there."""


class Cable:
    """Passes frames between two ends; a process of its own does the work."""

    def __init__(self, near: End, far: End) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.chaos.cable", *near, *far],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        self._delay = 0.0
        assert self._popen.stdout is not None
        ready, _, _ = select.select([self._popen.stdout], [], [], READY_SECONDS)
        if not ready or self._popen.stdout.readline() != b"ready\n":
            self.close()
            raise RuntimeError("the cable's process did not start")

    def delay(self, seconds: float) -> None:
        """From now on every frame takes so long."""
        self._delay = seconds
        self._order((0, 0))

    def change_rows(self, counts: tuple[int, int], seconds: float) -> None:
        """Changes rows in so many of the TCP segments that are to come from the near and the far
        end; returns after the first.

        Raises:
            TimeoutError: none came in time.
        """
        self._order(counts)
        assert self._popen.stdout is not None
        if not select.select([self._popen.stdout], [], [], seconds)[0]:
            raise TimeoutError(f"no rows came by within {seconds} s")
        os.read(self._popen.stdout.fileno(), FRAME_BYTES)

    def _order(self, counts: tuple[int, int]) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(_ORDER.pack(self._delay, *counts))
        self._popen.stdin.flush()

    def close(self) -> None:
        """Ends the process; its devices go with it."""
        self._popen.kill()
        self._popen.wait(10)
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()


def open_tap(namespace: str, device: str) -> int:
    """Makes a TAP device in a namespace; returns its file descriptor, which works from anywhere."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as there, open("/proc/self/ns/net") as here:
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"entering {namespace}")
        try:
            tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            request = struct.pack("16sH22x", device.encode(), _IFF_TAP | _IFF_NO_PI)
            fcntl.ioctl(tap, _TUNSETIFF, request)
        finally:
            libc.setns(here.fileno(), _CLONE_NEWNET)
    return tap


def carry(ends: list[int]) -> None:
    """Passes frames both ways until standard input ends."""
    control = sys.stdin.fileno()
    delay = 0.0
    changer, to_change = RowChanger(), [0, 0]
    waiting: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    while True:
        now = time.monotonic()
        due = [queue[0][0] - now for queue in waiting if queue]
        readable, _, _ = select.select(
            [control, *ends], [], [], max(min(due), 0.0) if due else None
        )
        if control in readable:
            raw = os.read(control, _ORDER.size)
            if len(raw) < _ORDER.size:
                return
            delay, *counts = _ORDER.unpack(raw)
            to_change = [left + more for left, more in zip(to_change, counts, strict=True)]
        now = time.monotonic()
        for side, end in enumerate(ends):
            if end in readable:
                read = os.read(end, FRAME_BYTES)
                frame = changer.pass_on(read, change=to_change[side] > 0)
                if frame != read:
                    to_change[side] -= 1
                    print("changed", flush=True)
                waiting[side].append((now + delay, frame))
        for side, queue in enumerate(waiting):
            while queue and queue[0][0] <= now:
                _pass_on(ends[1 - side], queue.popleft()[1])


def _pass_on(end: int, frame: bytes) -> None:
    try:
        os.write(end, frame)
    except OSError:
        # The device is down, or its queue is full: a frame is lost, as on any cable.
        return


if __name__ == "__main__":
    taps = [open_tap(*sys.argv[1:3]), open_tap(*sys.argv[3:5])]
    print("ready", flush=True)
    carry(taps)
