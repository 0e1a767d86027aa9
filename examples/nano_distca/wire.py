"""The wire: one message between two processes, over gloo, and a peer that is gone.

Gloo on one host is too fast for a network's time to be seen. So each message ends with the time at
which it left (one host has one clock), and waiting for it lasts until a slower wire had brought it:

    arrival = max(left, arrival of the message before) + bytes / bytes_per_second
"""

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

DEADLINE = timedelta(seconds=20)
STAMP_BYTES = 8


class PeerLost(Exception):
    """The process that a message was expected from has ended."""


class Wire:
    """Messages of process ``me``, whose numbers are of ``dtype``; all meet in ``folder``."""

    def __init__(
        self, me: int, n_processes: int, folder: str, dtype: torch.dtype, bytes_per_second: float
    ) -> None:
        where = f"file://{folder}/rendezvous"
        dist.init_process_group(
            "gloo", init_method=where, rank=me, world_size=n_processes, timeout=DEADLINE
        )
        self.dtype, self._me, self._bytes_per_second = dtype, me, bytes_per_second
        self._own: dict[int, torch.Tensor] = {}
        self._sent: list[tuple[dist.Work | None, torch.Tensor]] = []  # Kept until the step ends.
        self._arrived = 0.0

    def send(self, message: torch.Tensor, to: int, tag: int) -> None:
        """Sends without waiting; a message to itself is only kept."""
        if to == self._me:
            self._own[tag] = message
            return
        stamp = torch.tensor([time.monotonic()], dtype=torch.float64)
        stamped = torch.cat([message.view(torch.uint8), stamp.view(torch.uint8)])
        with contextlib.suppress(RuntimeError):  # It has ended: who waits for its reply finds out.
            self._sent.append((dist.isend(stamped, to, tag=tag), stamped))

    def receive(self, n_numbers: int, source: int, tag: int) -> Callable[[], torch.Tensor]:
        """Posts a receive before the message can arrive; returns the function that waits for it,
        which raises PeerLost if it never will."""
        if source == self._me:
            return lambda: self._own.pop(tag)
        buffer = torch.empty(n_numbers * self.dtype.itemsize + STAMP_BYTES, dtype=torch.uint8)
        work: dist.Work | None = None
        with contextlib.suppress(RuntimeError):
            work = dist.irecv(buffer, source, tag=tag)

        def wait() -> torch.Tensor:
            if work is None:
                raise PeerLost
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerLost from error
            left = float(buffer[-STAMP_BYTES:].clone().view(torch.float64))
            self._arrived = max(left, self._arrived) + len(buffer) / self._bytes_per_second
            time.sleep(max(0.0, self._arrived - time.monotonic()))
            return buffer[:-STAMP_BYTES].clone().view(self.dtype)

        return wait
