"""Reports of a member to the control plane, repeated until they are taken."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from distca.contract import rpc
from distca.contract.lifeline import AnyContact, Lifeline

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 0.1
"""Before a report is sent to the next contact."""


@dataclass(frozen=True)
class _Report(Generic[AnyContact]):
    what: str
    send: Callable[[AnyContact], None]
    over: Callable[[], bool]


class Outbox(Generic[AnyContact]):
    """Sends reports one after the other from a thread of its own; while the control plane is away
    they wait. A report that is refused is logged.

    Args:
        lifeline: to the control plane.
    """

    def __init__(self, lifeline: Lifeline[AnyContact]) -> None:
        self._lifeline = lifeline
        self._reports: queue.SimpleQueue[_Report[AnyContact] | None] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distca-outbox", daemon=True)

    def start(self) -> None:
        """Begins to send."""
        self._thread.start()

    def put(
        self,
        what: str,
        send: Callable[[AnyContact], None],
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Takes in a report; returns at once.

        Args:
            what: for the log.
            send: reports it once.
            over: whether nobody needs to know any more.
        """
        self._reports.put(_Report(what, send, over))

    def close(self, timeout_seconds: float) -> None:
        """Sends what is there, for ``timeout_seconds`` at most."""
        self._reports.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        self._ending.set()

    def _run(self) -> None:
        while (report := self._reports.get()) is not None:
            self._deliver(report)

    def _deliver(self, report: _Report[AnyContact]) -> None:
        while not report.over():
            contact = self._lifeline.await_contact()
            if contact is None:
                return
            try:
                report.send(contact)
                return
            except rpc.RpcError as error:
                if not contact.is_lost_by(error):
                    logger.warning("%s: %s was refused: %s", self._lifeline.who, report.what, error)
                    return
                self._lifeline.let_go(contact, error)
                self._ending.wait(AGAIN_SECONDS)
