"""The other end of a self test, in a process of its own: listens and answers probes."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from data_plane.transport import Address, Claim, Connection, TransportName, check_transport
from data_plane.transports import open_transport

HELLO = b"distca doctor"
"""First message of a doctor; a server refuses it."""

OPEN_SECRET = b"distca doctor: no secret"
"""A doctor's proof to its responder. It is no secret: both are of one machine."""

_LOG_OF_UCX = {"UCX_LOG_FILE": "/dev/stderr"}
"""UCX logs to stdout by default, between whatever else is written there."""

_CHILD_START_SECONDS = 60.0
"""It imports PyTorch, on a machine that may be busy."""


class ChildFailed(Exception):
    """The responder in a process of its own did not start; the message ends with what it said."""


@dataclass(frozen=True, kw_only=True)
class ResponderSettings:
    """The address to listen on, and the memory to answer with.

    Attributes:
        host: address of this machine.
        device: ``"cpu"`` or ``"cuda:<index>"``.
        transport: ``"auto"``, ``"ucxx"`` or ``"nixl"``.
        one_host: use shared memory.
    """

    host: str
    device: str = "cpu"
    transport: str = TransportName.AUTO
    one_host: bool = False

    def __post_init__(self) -> None:
        check_transport(self.transport)


@contextmanager
def responding(settings: ResponderSettings) -> Iterator[Address]:
    """Answers probes until the block ends; gives the address it listens on."""
    transport = open_transport(
        settings.transport,
        device=settings.device,
        one_host=settings.one_host,
        data_host=settings.host,
    )
    try:
        yield transport.listen(settings.host, 0, _accept)
    finally:
        transport.close()


@contextmanager
def child_responder(settings: ResponderSettings) -> Iterator[Address]:
    """A responder in a process of its own, as a peer on this machine is."""
    child = subprocess.Popen(
        [sys.executable, "-m", "distca.apps.doctor.responder", json.dumps(asdict(settings))],
        env=os.environ | _LOG_OF_UCX,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield _address_of(child)
    finally:
        child.kill()
        child.communicate(timeout=10)


def _accept(claim: Claim, connection: Connection) -> bytes:
    claim.check(OPEN_SECRET)
    return b""


def _address_of(child: subprocess.Popen[bytes]) -> Address:
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        ready = selector.select(_CHILD_START_SECONDS)
    line = child.stdout.readline() if ready else b""
    if not line:
        child.kill()
        _, said = child.communicate(timeout=10)
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise ChildFailed(f"a second process with UCX did not start: {last or 'no word from it'}")
    return Address(**json.loads(line))


def main() -> None:
    """Responds as a child process: settings as JSON in the first argument, its address as the only
    line that it writes. It ends with its parent, which holds the other end of stdin."""
    settings = ResponderSettings(**json.loads(sys.argv[1]))
    with responding(settings) as address:
        sys.stdout.write(json.dumps(asdict(address)) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
