"""A cable between two network namespaces that delays what it carries.

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
from pathlib import Path

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
FRAME_BYTES = 65536
READY_SECONDS = 20.0

End = tuple[str, str]
"""A namespace and the name of the device there."""


class Cable:
    """Passes frames between two ends; a process of its own does the work."""

    def __init__(self, near: End, far: End) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.cable", *near, *far],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[2],
        )
        assert self._popen.stdout is not None
        ready, _, _ = select.select([self._popen.stdout], [], [], READY_SECONDS)
        if not ready or self._popen.stdout.readline() != b"ready\n":
            self.close()
            raise RuntimeError("the cable's process did not start")

    def delay(self, seconds: float) -> None:
        """From now on every frame takes so long."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(struct.pack("d", seconds))
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
    waiting: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    while True:
        now = time.monotonic()
        due = [queue[0][0] - now for queue in waiting if queue]
        readable, _, _ = select.select(
            [control, *ends], [], [], max(min(due), 0.0) if due else None
        )
        if control in readable:
            raw = os.read(control, 8)
            if len(raw) < 8:
                return
            (delay,) = struct.unpack("d", raw)
        now = time.monotonic()
        for side, end in enumerate(ends):
            if end in readable:
                waiting[side].append((now + delay, os.read(end, FRAME_BYTES)))
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
