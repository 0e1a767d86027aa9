"""The other end of a self test, in a process of its own: listens and answers probes."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe

from data_plane.transport import Address, Claim, Connection, TransportName, check_transport
from data_plane.transports import open_transport

HELLO = b"distca doctor"
"""First message of a doctor; a server refuses it."""

OPEN_SECRET = b"distca doctor: no secret"
"""A doctor's proof to its responder. It is no secret: both are of one machine."""

_CHILD_START_SECONDS = 60.0
"""It imports PyTorch, on a machine that may be busy."""

_CHILD_END_SECONDS = 10.0
"""A driver may hold up a process that is killed."""


@dataclass(frozen=True, kw_only=True)
class ResponderSettings:
    """The address to listen on, and the memory to answer with.

    Attributes:
        host: address of this machine.
        device: ``"cpu"`` or ``"cuda:<index>"``.
        transport: ``"auto"``, ``"ucxx"``, ``"nixl"`` or ``"nixl:libfabric"``.
        one_host: use shared memory.
    """

    host: str
    device: str = "cpu"
    transport: str = TransportName.AUTO
    one_host: bool = False

    def __post_init__(self) -> None:
        check_transport(self.transport)


@contextmanager
def child_responder(settings: ResponderSettings) -> Iterator[Address]:
    """A responder in a process of its own, as a peer on this machine is."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_respond, args=(settings, theirs), daemon=True)
    with theirs:
        child.start()
    try:
        yield _address_of(ours)
    finally:
        child.kill()
        child.join(_CHILD_END_SECONDS)


def _address_of(pipe: Pipe) -> Address:
    said: object = "no word from it"
    with suppress(EOFError):
        if pipe.poll(_CHILD_START_SECONDS):
            said = pipe.recv()
    if not isinstance(said, Address):
        raise RuntimeError(f"a second process with UCX did not start: {said}")
    return said


def _respond(settings: ResponderSettings, pipe: Pipe) -> None:
    """Listens, says where, and answers probes until the other end of ``pipe`` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the doctor, who ends this.
    try:
        transport = open_transport(
            settings.transport,
            device=settings.device,
            one_host=settings.one_host,
            data_host=settings.host,
        )
        pipe.send(transport.listen(settings.host, 0, _accept))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    with suppress(EOFError):
        pipe.recv()
    transport.close()


def _accept(claim: Claim, connection: Connection) -> bytes:
    claim.check(OPEN_SECRET)
    return b""
