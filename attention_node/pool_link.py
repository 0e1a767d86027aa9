"""A node's link to the control plane: its lease, its plans, its reports.

Three threads: one sends heartbeats, one watches for jobs and plans
(:mod:`distca.contract.lifeline`), one sends reports (:mod:`distca.contract.outbox`). While the
control plane is away the node goes on serving what it has. A control plane that does not know the
node (it has started again) gets to know it, and nothing changes for the jobs. One that took the
lease away has given the node's work to others: then everything is dropped first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from attention_node.served_job import StepBusy
from distca.contract import rpc
from distca.contract.contact import Contact
from distca.contract.lifeline import Lifeline
from distca.contract.outbox import Outbox
from distca.contract.timeouts import default_seconds
from distca.v1 import jobs_pb2, membership_pb2

logger = logging.getLogger(__name__)

BUSY_SECONDS = 1.0
"""A fenced server whose executor has finished nothing for so long does not register yet."""


FLUSH_SECONDS = default_seconds("flush_seconds")
"""How long leaving waits for reports that are under way."""


class PoolLinkLost(RuntimeError):
    """The node is no longer part of the pool; the message says why."""


class PoolContact(Contact):
    """A control plane that a server has reached; calls raise ``distca.contract.rpc.RpcError``."""

    LOST = frozenset({rpc.Reason.LEASE_EXPIRED, rpc.Reason.FENCED})

    def register(self, description: membership_pb2.ServerDescription, *, replace: bool) -> None:
        """Joins the pool, under a new lease; with ``replace`` in the place of a live server."""
        response = self.call(
            self._membership.RegisterServer,
            membership_pb2.RegisterServerRequest(server=description, replace=replace),
        )
        self.lease_id, self.lease_seconds = response.lease_id, response.lease_seconds

    def keep(self, lease_id: str, load: membership_pb2.ServerLoad) -> None:
        """Goes on with the lease of an earlier contact, if the control plane still knows it."""
        self.lease_id = lease_id
        self.beat(load)

    def beat(self, load: membership_pb2.ServerLoad) -> bool:
        """Renews the lease; returns whether the server is to drain."""
        response = self.call(
            self._membership.Heartbeat,
            membership_pb2.HeartbeatRequest(lease_id=self.lease_id, load=load),
            timeout_seconds=self.renewal_deadline_seconds,
        )
        self.lease_seconds = response.lease_seconds
        return bool(response.draining)

    def watch(self) -> None:
        """Begins the stream of events."""
        self.events = self._jobs.WatchServer(jobs_pb2.WatchServerRequest(lease_id=self.lease_id))

    def report_step(self, job_id: str, step: int, measured: jobs_pb2.ServerMeasurement) -> None:
        """Reports the measurements of a step."""
        self.call(
            self._jobs.ReportStep,
            jobs_pb2.ReportStepRequest(
                job_id=job_id, step=step, lease_id=self.lease_id, server=measured
            ),
        )

    def report_rank_lost(self, job_id: str, rank: int) -> None:
        """Reports that the connection to a rank was reset."""
        self.call(
            self._membership.ReportRankLost,
            membership_pb2.ReportRankLostRequest(lease_id=self.lease_id, job_id=job_id, rank=rank),
        )

    def drain(self, server_id: str) -> None:
        """Asks for no more plans."""
        self.call(
            self._membership.DrainServer,
            membership_pb2.DrainServerRequest(server_id=server_id, lease_id=self.lease_id),
        )

    def deregister(self) -> None:
        """Ends the lease."""
        self.call(
            self._membership.DeregisterServer,
            membership_pb2.DeregisterServerRequest(lease_id=self.lease_id),
        )


class PoolLink:
    """One server's membership in the pool.

    Args:
        settings: how to reach the control plane; with several addresses, its standbys too.
        description: what the server is and can do.
        load: reads the load for heartbeats.
        lost_ranks: the ranks, by job, whose connections were reset of late.
        on_event: called with each event of the server's jobs.
        on_registered: called after each registration, before the events that follow it.
        on_fenced: called when the control plane has taken the lease away: every job and connection
            is to be dropped.
        on_drain: called once, when the control plane asks the server to drain.
        on_lost: called once, when the membership ends for another reason than :meth:`leave`.
        away_seconds: how long the control plane may be away.
        replace: the first registration ends the membership of a live server of the name.

    ``on_event``, ``on_registered`` and ``on_fenced`` are called on the watching thread.
    """

    def __init__(
        self,
        settings: rpc.RpcSettings,
        description: membership_pb2.ServerDescription,
        *,
        load: Callable[[], membership_pb2.ServerLoad],
        lost_ranks: Callable[[], Sequence[tuple[str, int]]] = lambda: (),
        on_event: Callable[[jobs_pb2.PlanEvent], None],
        on_registered: Callable[[], None],
        on_fenced: Callable[[], None],
        on_drain: Callable[[], None],
        on_lost: Callable[[PoolLinkLost], None],
        away_seconds: float,
        replace: bool = False,
    ) -> None:
        self._description = description
        self._load = load
        self._lost_ranks = lost_ranks
        self._on_registered = on_registered
        self._on_fenced = on_fenced
        self._on_drain = on_drain
        self._on_lost = on_lost
        self._lifeline: Lifeline[PoolContact] = Lifeline(
            settings,
            first=self._first_contact,
            again=self._come_back,
            renew=self._beat,
            on_event=on_event,
            on_broken=self.broken,
            # A node that drains does without a control plane that goes away.
            wanted=lambda: not self._draining,
            away_seconds=away_seconds,
        )
        self._lifeline.who = f"server {description.server_id}"
        self._replace = replace
        self._draining = False
        self._dropped_lease = ""
        self._left = False
        self._lost = False
        self._outbox = Outbox(self._lifeline)

    @property
    def connected(self) -> bool:
        """Returns whether the control plane can be reached, as far as is known."""
        return self._lifeline.contact is not None

    def join(self) -> None:
        """Registers and starts the heartbeat and the watch."""
        contact = self._lifeline.join()
        self._on_registered()
        self._lifeline.start(renewing="distca-heartbeat")
        self._outbox.start()
        logger.info("server %s registered at %s", self._description.server_id, contact.address)

    def report(self, busy: StepBusy) -> None:
        """Reports the busy seconds of a finished step, to a control plane that is there."""
        if self._left or self._lifeline.contact is None:
            return
        measurement = jobs_pb2.ServerMeasurement(
            server_id=self._description.server_id,
            forward_busy_seconds=busy.forward_seconds,
            backward_busy_seconds=busy.backward_seconds,
            backward_layers=busy.backward_layers,
        )
        self._outbox.put(
            f"the report of step {busy.step}",
            lambda contact: contact.report_step(busy.job_id, busy.step, measurement),
        )

    def report_rank_lost(self, job_id: str, rank: int) -> None:
        """Reports that the connection to a rank was reset, unless the rank makes another before the
        control plane can be informed."""
        if self._left:
            return
        self._outbox.put(
            f"the loss of rank {rank} of job {job_id}",
            lambda contact: contact.report_rank_lost(job_id, rank),
            over=lambda: (job_id, rank) not in self._lost_ranks(),
        )

    def drain(self) -> None:
        """Asks the control plane to plan nothing more for the server; a failure is logged only.
        From now on the node does without a control plane that goes away."""
        self._draining = True
        contact = self._lifeline.contact
        if contact is None:
            self._lifeline.finish()
            return
        try:
            contact.drain(self._description.server_id)
        except rpc.RpcError as error:
            logger.warning("asking to be drained: %s", error)

    def leave(self) -> None:
        """Ends the lease and the threads. Idempotent."""
        if self._left:
            return
        self._left = True
        self._outbox.close(FLUSH_SECONDS)
        contact = self._lifeline.contact
        # Before the call, since it ends the stream of events.
        self._lifeline.finish()
        if contact is not None:
            try:
                contact.deregister()
            except rpc.RpcError as error:
                logger.warning("deregistering: %s", error)
        self._lifeline.end()

    def _first_contact(self, settings: rpc.RpcSettings) -> PoolContact:
        contact = PoolContact(settings)
        try:
            contact.register(self._description, replace=self._replace)
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
            except rpc.RpcError as error:
                if error.reason not in PoolContact.LOST:
                    raise
                if error.reason is rpc.Reason.FENCED:
                    self._drop_everything(lease_id, error)
                # Else it has started again, and knows no plan either.
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
            raise rpc.RpcError(
                rpc.Reason.UNAVAILABLE,
                "RegisterServer",
                contact.address,
                f"not asked: the executor has finished nothing for {busy_seconds:.0f} s",
            )
        contact.register(self._description, replace=False)
        for job_id, rank in self._lost_ranks():
            self.report_rank_lost(job_id, rank)
        logger.info("server %s registered again", self._description.server_id)
        self._on_registered()

    def _drop_everything(self, lease_id: str, error: Exception) -> None:
        if lease_id != self._dropped_lease:
            self._dropped_lease = lease_id
            logger.error("fenced, dropping every job: %s", error)
            self._on_fenced()

    def _beat(self, contact: PoolContact) -> None:
        draining = contact.beat(self._load())
        if draining and not self._draining:
            self._draining = True
            self._on_drain()

    def broken(self, error: Exception) -> None:
        """Turns whatever ends the contact, or the handling of an event, into one call of
        ``on_lost``."""
        if self._left or self._lost:
            return
        self._lost = True
        logger.error("membership lost: %s", error)
        self._on_lost(PoolLinkLost(str(error)))
