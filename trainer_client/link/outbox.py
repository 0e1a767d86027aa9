"""What a rank has to tell the control plane, again and again until it is taken."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from distca.contract import rpc
from distca.contract.lifeline import Lifeline
from distca.contract.reconnect import is_transient
from trainer_client.link.contact import RankContact

logger = logging.getLogger(__name__)

CONTACT_LOST = (rpc.LeaseExpired, rpc.UnknownJob)
"""Beside what is transient: the control plane has started again, or took this rank for dead."""

AGAIN_SECONDS = 0.1
"""Before a letter is sent to the next contact."""


@dataclass(frozen=True)
class Letter:
    """Something to tell.

    Attributes:
        what: for the log.
        send: tells it once.
        over: whether nobody needs to know any more.
    """

    what: str
    send: Callable[[RankContact], None]
    over: Callable[[], bool] = lambda: False


class Outbox:
    """Sends letters one after the other from a thread of its own; while the control plane is away
    they wait. A letter that is refused is logged.

    Args:
        lifeline: to the control plane.
    """

    def __init__(self, lifeline: Lifeline[RankContact]) -> None:
        self._lifeline = lifeline
        self._letters: queue.SimpleQueue[Letter | None] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distca-outbox", daemon=True)

    def start(self) -> None:
        """Begins to send."""
        self._thread.start()

    def put(self, letter: Letter) -> None:
        """Takes in a letter; returns at once."""
        self._letters.put(letter)

    def close(self, timeout_seconds: float) -> None:
        """Sends what is there, for ``timeout_seconds`` at most."""
        self._letters.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        self._ending.set()

    def _run(self) -> None:
        while (letter := self._letters.get()) is not None:
            self._deliver(letter)

    def _deliver(self, letter: Letter) -> None:
        while not letter.over():
            contact = self._lifeline.await_contact()
            if contact is None:
                return
            try:
                letter.send(contact)
                return
            except rpc.RpcError as error:
                if not is_contact_lost(error):
                    logger.warning("%s: %s was refused: %s", self._lifeline.who, letter.what, error)
                    return
                self._lifeline.let_go(contact, error)
                self._ending.wait(AGAIN_SECONDS)


def is_contact_lost(error: rpc.RpcError) -> bool:
    """Whether to find the control plane again and repeat the call, rather than give it up."""
    return is_transient(error) or isinstance(error, CONTACT_LOST)
