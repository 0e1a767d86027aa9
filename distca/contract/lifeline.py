"""The lifeline that keeps a rank or a server in contact with its control plane.

Two threads: one reads events and, when the control plane is away, looks for it at all its
addresses, with backoff and jitter; the other renews the lease, and notices new certificates, which
the first takes into use with a new contact.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from distca.contract import rpc
from distca.contract.contact import Contact
from distca.contract.reconnect import Addresses, reach
from distca.contract.rotation import Rotation
from distca.errors import DistcaError

logger = logging.getLogger(__name__)

DOUBTED_SECONDS = 1.0
"""Between two renewals of a lease that are made because somebody waits."""

AnyContact = TypeVar("AnyContact", bound=Contact)


class Lifeline(Generic[AnyContact]):
    """Keeps one member in contact.

    Args:
        settings: how to reach the control plane; with several addresses, its standbys too.
        first: makes the first contact: reaches the control plane there, joins, and watches.
        again: the same after a loss, given the lease of before.
        renew: renews the lease of a contact.
        on_event: called with each event, on the watching thread.
        on_broken: called with what ends the contact for good; it may be called more than once.
        wanted: whether to look for a control plane that is away.
        away_seconds: how long it may be away.

    Attributes:
        who: is kept in contact, for logs.
        expects_end: the control plane is about to end the stream of events, which is no loss.
        lost_at: ``time.monotonic()`` of its last message before it was lost the last time.
    """

    def __init__(
        self,
        settings: rpc.RpcSettings,
        *,
        first: Callable[[rpc.RpcSettings], AnyContact],
        again: Callable[[str, rpc.RpcSettings], AnyContact],
        renew: Callable[[AnyContact], None],
        on_event: Callable[[Any], None],
        on_broken: Callable[[Exception], None],
        wanted: Callable[[], bool] = lambda: True,
        away_seconds: float,
    ) -> None:
        self.who = ""
        self.expects_end = False
        self.lost_at = 0.0
        self._settings = settings.following_files()
        self._addresses = Addresses(self._settings)
        self._rotation = Rotation(self._settings)
        self._first = first
        self._again = again
        self._renew = renew
        self._on_event = on_event
        self._on_broken = on_broken
        self._wanted = wanted
        self._away_seconds = away_seconds
        self._contact: AnyContact | None = None
        # A contact that works, with certificates that have been replaced since.
        self._outdated: AnyContact | None = None
        self._changed = threading.Condition()
        self._renewed_at = 0.0
        self._is_doubted = False
        self._finished = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def contact(self) -> AnyContact | None:
        """The control plane as it is reached now; None while it is away."""
        return self._contact

    def join(self) -> AnyContact:
        """Makes the first contact."""
        contact = reach(
            self._first,
            self._addresses,
            timeout_seconds=self._settings.connect_seconds,
            giving_up=self._finished,
            again=lambda reason: reason.is_away or reason is rpc.Reason.RATE_LIMITED,
        )
        self._set(contact)
        return contact

    def start(self, *, renewing: str) -> None:
        """Starts the threads, of which ``renewing`` names one."""
        for name, target in (("distca-watch", self._watch), (renewing, self._keep_renewing)):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def present(self) -> AnyContact:
        """The contact.

        Raises:
            distca.contract.rpc.RpcError: the control plane is away.
        """
        contact = self._contact
        if contact is None:
            raise rpc.RpcError(
                rpc.Reason.UNAVAILABLE,
                "contact",
                str(self._addresses),
                "it is away, and looked for",
            )
        return contact

    def await_contact(self) -> AnyContact | None:
        """The contact, once there is one; None when none is needed any more."""
        with self._changed:
            while self._contact is None:
                if self._finished.is_set():
                    return None
                self._changed.wait(0.5)
            return self._contact

    def renew_soon(self) -> None:
        """Somebody waits for the control plane: whether it answers is found out before the lease is
        due."""
        with self._changed:
            if time.monotonic() > self._renewed_at + DOUBTED_SECONDS:
                self._is_doubted = True
                self._changed.notify_all()

    def let_go(self, contact: AnyContact, error: Exception, lost_at: float | None = None) -> None:
        """``contact`` is of no use any more; the watching thread looks for a new one. ``lost_at``:
        of its last message; None: just now."""
        with self._changed:
            if self._contact is not contact:
                return
            self._contact = None
            self.lost_at = time.monotonic() if lost_at is None else lost_at
            self._changed.notify_all()
        if isinstance(error, rpc.RpcError) and error.reason is rpc.Reason.DEADLINE_EXCEEDED:
            # It is there and answers nothing: a standby's turn.
            self._addresses.advance()
        if not self._finished.is_set():
            logger.warning(
                "%s: lost the control plane at %s, work goes on: %s",
                self.who,
                contact.address,
                error,
            )
        contact.interrupt()

    def finish(self) -> None:
        """No control plane is looked for any more."""
        self._finished.set()
        with self._changed:
            self._changed.notify_all()

    def end(self) -> None:
        """Ends contact and threads. Idempotent."""
        self.finish()
        contact = self._contact
        self._set(None)
        if contact is not None:
            contact.end()
        for thread in self._threads:
            thread.join(2.0)

    def _set(self, contact: AnyContact | None) -> None:
        with self._changed:
            self._contact = contact
            self._changed.notify_all()

    def _watch(self) -> None:
        contact = self._contact
        try:
            while contact is not None:
                self._follow(contact)
                if contact is not self._outdated:
                    contact.end()
                    contact = self._look_for_it(contact.lease_id)
                    continue
                try:
                    following = self._look_for_it(contact.lease_id)
                finally:
                    contact.retire()
                contact = following
        except Exception as error:
            # Whatever breaks this thread would leave others waiting: hand it over.
            self._on_broken(error)

    def _follow(self, contact: AnyContact) -> None:
        """Handles events until the stream ends."""
        assert contact.events is not None
        try:
            for event in contact.events:
                self._on_event(event)
                if self._finished.is_set():
                    return
            if self.expects_end:
                self.finish()
            else:
                self._stream_ended(contact, DistcaError("it ended the stream of events"))
        except rpc.RpcError as error:
            self._stream_ended(contact, error)

    def _stream_ended(self, contact: AnyContact, error: Exception) -> None:
        if contact is not self._outdated:
            self.let_go(contact, error)

    def _look_for_it(self, lease_id: str) -> AnyContact | None:
        """A new contact, with lease ``lease_id`` if that still runs; None if none is needed."""
        if not self._wanted():
            self.finish()
        if self._finished.is_set():
            return None
        began = time.monotonic()
        try:
            contact = reach(
                lambda settings: self._again(lease_id, settings),
                self._addresses,
                timeout_seconds=self._away_seconds,
                giving_up=self._finished,
                again=lambda reason: reason.is_transient or reason is rpc.Reason.OTHER,
            )
        except rpc.RpcError as error:
            if not error.reason.is_away:
                raise
            if self._finished.is_set():
                return None
            raise DistcaError(
                f"the control plane has been away for {self._away_seconds:g} s: {error}"
            ) from error
        self._set(contact)
        if self._finished.is_set():
            # Nobody may have seen it in time to end it.
            contact.end()
            return None
        logger.info(
            "%s: back at the control plane at %s after %.1f s%s",
            self.who,
            contact.address,
            time.monotonic() - began,
            "" if contact.lease_id == lease_id else ", under a new lease",
        )
        return contact

    def _keep_renewing(self) -> None:
        while (contact := self.await_contact()) is not None:
            if self._is_replaced(contact):
                continue
            self._renewed_at, self._is_doubted = time.monotonic(), False
            try:
                self._renew(contact)
            except rpc.RpcError as error:
                self.let_go(contact, error, self._renewed_at)
            except Exception as error:
                self._on_broken(error)
                return

    def _is_replaced(self, contact: AnyContact) -> bool:
        """Waits until the lease is to be renewed, and notices new certificates meanwhile; whether
        ``contact`` has ended."""
        due_at = time.monotonic() + contact.renewal_seconds
        while (left := due_at - time.monotonic()) > 0:
            with self._changed:
                if self._changed.wait_for(
                    lambda: self._contact is not contact or self._is_doubted,
                    min(left, self._settings.certificate_check_seconds),
                ):
                    return self._contact is not contact
            if (
                contact is not self._outdated
                and not self.expects_end
                and self._wanted()
                and self._rotation.is_due(contact.settings)
            ):
                logger.info("%s: going over to new certificates", self.who)
                self._outdated = contact
                contact.interrupt()
        return self._contact is not contact
