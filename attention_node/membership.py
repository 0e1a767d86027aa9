"""A node's link to the control plane: its lease, its plans, its reports.

Three threads: one sends heartbeats, one watches for jobs and plans, one sends reports. While the
control plane is away the node goes on serving what it has, and the watching thread looks for the
control plane. A control plane that does not know the node (it has started again) is told of it
anew, and nothing changes for the jobs. One that took the lease away has given the node's work to
others: then everything is dropped first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from attention_node.pool_contact import PoolContact
from attention_node.served_job import StepBusy
from distca import rpc
from distca.reconnect import Addresses, is_transient, reach
from distca.v1 import jobs_pb2, membership_pb2

logger = logging.getLogger(__name__)


BUSY_SECONDS = 1.0
"""A fenced server whose executor has finished nothing for so long does not register yet."""


class MembershipLost(RuntimeError):
    """The node is no longer part of the pool; the message says why."""


class Membership:
    """One server's membership in the pool.

    Args:
        settings: how to reach the control plane; with several addresses, its standbys too.
        description: what the server is and can do.
        load: reads the load for heartbeats.
        on_event: called with each event of the server's jobs.
        on_registered: called after each registration, before the events that follow it.
        on_fenced: called when the control plane has taken the lease away: every job and connection
            is to be dropped.
        on_drain: called once, when the control plane asks the server to drain.
        on_lost: called once, when the membership ends for another reason than :meth:`leave`.
        away_seconds: how long the control plane may be away.

    ``on_event``, ``on_registered`` and ``on_fenced`` are called on the watching thread.
    """

    def __init__(
        self,
        settings: rpc.RpcSettings,
        description: membership_pb2.ServerDescription,
        *,
        load: Callable[[], membership_pb2.ServerLoad],
        on_event: Callable[[jobs_pb2.PlanEvent], None],
        on_registered: Callable[[], None],
        on_fenced: Callable[[], None],
        on_drain: Callable[[], None],
        on_lost: Callable[[MembershipLost], None],
        away_seconds: float,
    ) -> None:
        self._settings = settings
        self._addresses = Addresses(settings)
        self._description = description
        self._load = load
        self._on_event = on_event
        self._on_registered = on_registered
        self._on_fenced = on_fenced
        self._on_drain = on_drain
        self._on_lost = on_lost
        self._away_seconds = away_seconds
        self._contact: PoolContact | None = None
        self._changed = threading.Condition()
        self._draining = False
        self._dropped_lease = ""
        # No control plane is looked for any more: the node leaves, or drains without one.
        self._giving_up = threading.Event()
        self._leaving = threading.Event()
        self._lost = False
        self._threads: list[threading.Thread] = []
        self._outbox = ThreadPoolExecutor(max_workers=1, thread_name_prefix="distca-reports")

    def join(self) -> None:
        """Registers and starts the heartbeat and the watch. If a server of the same name still
        holds a lease, such as the process before this one, waits for its end.

        Raises:
            distca.rpc.RpcError: the control plane cannot be reached, or refuses.
        """
        contact = reach(
            self._first_contact,
            self._addresses,
            timeout_seconds=self._settings.connect_seconds,
            giving_up=self._giving_up,
            again=lambda error: isinstance(
                error, rpc.ControlPlaneUnavailable | rpc.AlreadyExists | rpc.RateLimited
            ),
        )
        self._contact = contact
        self._on_registered()
        for name, target in (
            ("distca-heartbeat", self._beat),
            ("distca-watch", lambda: self._watch(contact)),
        ):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        logger.info("server %s registered at %s", self._description.server_id, contact.address)

    def report(self, busy: StepBusy) -> None:
        """Sends the busy seconds of a finished step; a failure is logged only."""
        contact = self._contact
        if self._leaving.is_set() or contact is None:
            return
        measurement = jobs_pb2.ServerMeasurement(
            server_id=self._description.server_id,
            forward_busy_seconds=busy.forward_seconds,
            backward_busy_seconds=busy.backward_seconds,
        )
        future: Future[object] = self._outbox.submit(
            contact.report_step, busy.job_id, busy.step, measurement
        )
        future.add_done_callback(rpc.log_lost_report)

    def drain(self) -> None:
        """Asks the control plane to plan nothing more for the server; a failure is logged only.
        From now on the node does without a control plane that goes away."""
        self._draining = True
        contact = self._contact
        if contact is None:
            self._giving_up.set()
            return
        try:
            contact.drain(self._description.server_id)
        except rpc.RpcError as error:
            logger.warning("asking to be drained: %s", error)

    def leave(self) -> None:
        """Ends the lease and the threads. Idempotent."""
        if self._leaving.is_set():
            return
        self._leaving.set()
        self._giving_up.set()
        self._outbox.shutdown(wait=True, cancel_futures=False)
        contact = self._contact
        self._set_contact(None)
        if contact is not None:
            try:
                contact.deregister()
            except rpc.RpcError as error:
                logger.warning("deregistering: %s", error)
            contact.end()
        for thread in self._threads:
            thread.join(2.0)

    def _first_contact(self, settings: rpc.RpcSettings) -> PoolContact:
        contact = PoolContact(settings)
        try:
            contact.register(self._description)
            contact.watch()
        except BaseException:
            contact.end()
            raise
        return contact

    def _come_back(self, lease_id: str, settings: rpc.RpcSettings) -> PoolContact:
        """A contact after a loss: with the lease of before, or under a new one."""
        contact = PoolContact(settings)
        try:
            try:
                contact.keep(lease_id, self._load())
            except rpc.Fenced as error:
                self._drop_everything(lease_id, error)
                self._register_again(contact)
            except rpc.LeaseExpired:
                # It does not know the lease: it has started again, and knows no plan either.
                self._register_again(contact)
            contact.watch()
        except BaseException:
            contact.end()
            raise
        return contact

    def _register_again(self, contact: PoolContact) -> None:
        """Registers, unless the executor is at work on what was dropped: then a later attempt
        does."""
        busy_seconds = self._load().oldest_ready_seconds
        if busy_seconds > BUSY_SECONDS:
            raise rpc.ControlPlaneUnavailable(
                "RegisterServer",
                contact.address,
                f"not asked: the executor has finished nothing for {busy_seconds:.0f} s",
            )
        contact.register(self._description)
        logger.info("server %s registered again", self._description.server_id)
        self._on_registered()

    def _drop_everything(self, lease_id: str, error: Exception) -> None:
        if lease_id != self._dropped_lease:
            self._dropped_lease = lease_id
            logger.error("fenced, dropping every job: %s", error)
            self._on_fenced()

    def _watch(self, contact: PoolContact | None) -> None:
        try:
            while contact is not None:
                self._follow(contact)
                contact.end()
                contact = self._look_for_it(contact.lease_id)
        except Exception as error:
            self._lose(error)

    def _follow(self, contact: PoolContact) -> None:
        """Handles events until the stream ends."""
        assert contact.events is not None
        try:
            for event in contact.events:
                self._on_event(event)
            self._let_go(contact, MembershipLost("it ended the stream of plans"))
        except rpc.RpcError as error:
            self._let_go(contact, error)

    def _look_for_it(self, lease_id: str) -> PoolContact | None:
        """A new contact; None if none is needed any more."""
        if self._draining:
            self._giving_up.set()
        if self._giving_up.is_set():
            return None
        began = time.monotonic()
        try:
            contact = reach(
                lambda settings: self._come_back(lease_id, settings),
                self._addresses,
                timeout_seconds=self._away_seconds,
                giving_up=self._giving_up,
                again=lambda error: (
                    is_transient(error)
                    or isinstance(error, rpc.AlreadyExists)
                    or type(error) is rpc.RpcError
                ),
            )
        except rpc.RpcError as error:
            if self._giving_up.is_set():
                return None
            raise MembershipLost(
                f"no way back to the control plane in {self._away_seconds:g} s: {error}"
            ) from error
        self._set_contact(contact)
        if self._leaving.is_set():
            contact.end()
            return None
        if self._draining:
            self.drain()
        logger.info(
            "back at the control plane at %s after %.1f s",
            contact.address,
            time.monotonic() - began,
        )
        return contact

    def _let_go(self, contact: PoolContact, error: Exception) -> None:
        """The control plane is away, or does not want this server."""
        if self._contact is not contact:
            return
        self._set_contact(None)
        if not self._giving_up.is_set():
            logger.warning("lost the control plane at %s: %s", contact.address, error)
        contact.interrupt()

    def _beat(self) -> None:
        while not self._leaving.is_set():
            contact = self._contact_in_need()
            if contact is None:
                continue
            try:
                draining = contact.beat(self._load())
            except rpc.RpcError as error:
                self._let_go(contact, error)
                continue
            except Exception as error:
                self._lose(error)
                return
            if draining and not self._draining:
                self._draining = True
                self._on_drain()

    def _contact_in_need(self) -> PoolContact | None:
        """Waits until a heartbeat is due, and returns the contact; None if that has changed
        meanwhile, or there has been none for a while."""
        contact = self._contact
        seconds = 1.0 if contact is None else contact.renewal_seconds
        with self._changed:
            replaced = self._changed.wait_for(lambda: self._contact is not contact, seconds)
        return None if replaced else contact

    def _set_contact(self, contact: PoolContact | None) -> None:
        with self._changed:
            self._contact = contact
            self._changed.notify_all()

    def _lose(self, error: Exception) -> None:
        """Turns whatever ends a thread into one call of ``on_lost``."""
        if self._giving_up.is_set() or self._lost:
            return
        self._lost = True
        logger.error("membership lost: %s", error)
        self._on_lost(MembershipLost(str(error)))
