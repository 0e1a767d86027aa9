"""The other end of a measurement: listens and answers probes, nothing else."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from data_plane.transport import Address, Claim, Connection, TransportName, check_transport
from data_plane.transports import open_transport
from distca import __version__
from distca.process.interrupt import StopRequest

_NOTICE_SECONDS = 0.2

HELLO = b"distca doctor"
"""First message of a doctor; a server refuses it."""

OPEN_SECRET = b"distca doctor: no secret"
"""What doctors prove to one another. It is no secret: a responder answers whoever asks."""


@dataclass(frozen=True, kw_only=True)
class ResponderSettings:
    """Where to listen, and with which memory to answer.

    Attributes:
        host: address of this machine.
        port: 0 takes any free one.
        device: ``"cpu"`` or ``"cuda:<index>"``.
        transport: ``"auto"``, ``"ucxx"`` or ``"nixl"``.
        one_host: let doctors of this machine use shared memory.
    """

    host: str
    port: int = 0
    device: str = "cpu"
    transport: str = TransportName.AUTO
    one_host: bool = False

    def __post_init__(self) -> None:
        check_transport(self.transport)


@contextmanager
def responding(settings: ResponderSettings) -> Iterator[Address]:
    """Answers probes until the block ends; gives the address it listens on.

    Raises:
        TransportError: the port is in use, or ``host`` is not of this machine.
    """
    transport = open_transport(
        settings.transport,
        device=settings.device,
        one_host=settings.one_host,
        data_host=settings.host,
    )
    try:
        yield transport.listen(settings.host, settings.port, _accept)
    finally:
        transport.close()


def respond_until_signal(settings: ResponderSettings) -> Iterator[Address]:
    """Yields the address once, then blocks until a signal.

    Raises:
        KeyboardInterrupt: it was Ctrl-C.
    """
    with StopRequest() as stop, responding(settings) as address:
        yield address
        while not stop.requested:
            time.sleep(_NOTICE_SECONDS)
    stop.check()


def _accept(claim: Claim, connection: Connection) -> bytes:
    claim.check(OPEN_SECRET)
    if claim.hello != HELLO:
        raise ValueError("this is distca doctor --listen, which answers other doctors only")
    return json.dumps({"version": __version__}).encode()


def main() -> None:
    """A child process of a doctor: its settings as JSON in the first argument, its address as the
    only line that it writes. It ends with its parent, which holds the other end of stdin."""
    settings = ResponderSettings(**json.loads(sys.argv[1]))
    with responding(settings) as address:
        sys.stdout.write(json.dumps(asdict(address)) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
