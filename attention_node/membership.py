"""A node's link to the control plane: its lease, its plans, its reports."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from attention_node.served_job import StepBusy
from distca import rpc
from distca.v1 import jobs_pb2, jobs_pb2_grpc, membership_pb2, membership_pb2_grpc

logger = logging.getLogger(__name__)


class MembershipLost(RuntimeError):
    """The node is no longer part of the pool; the message says why."""


class Membership:
    """One server's membership in the pool.

    Args:
        settings: how to reach the control plane.
        description: what the server is and can do.
        load: reads the load for heartbeats.
        on_event: called with each event of the server's jobs, on the watching thread.
        on_drain: called once, when the control plane asks the server to drain.
        on_lost: called once, when the membership ends for another reason than :meth:`leave`.
    """

    def __init__(
        self,
        settings: rpc.RpcSettings,
        description: membership_pb2.ServerDescription,
        *,
        load: Callable[[], membership_pb2.ServerLoad],
        on_event: Callable[[jobs_pb2.PlanEvent], None],
        on_drain: Callable[[], None],
        on_lost: Callable[[MembershipLost], None],
    ) -> None:
        self._settings = settings
        self._description = description
        self._load = load
        self._on_event = on_event
        self._on_drain = on_drain
        self._on_lost = on_lost
        self._channel: grpc.Channel = rpc.open_channel(settings)
        self._stub = membership_pb2_grpc.MembershipStub(self._channel)
        self._jobs = jobs_pb2_grpc.JobsStub(self._channel)
        self._lease_id = ""
        self._leaving = threading.Event()
        self._lost = threading.Event()
        self._threads: list[threading.Thread] = []
        self._events: rpc.EventStream | None = None
        self._outbox = ThreadPoolExecutor(max_workers=1, thread_name_prefix="distca-reports")

    def join(self) -> None:
        """Registers and starts the heartbeat and the watch.

        Raises:
            distca.rpc.RpcError: the control plane cannot be reached, or refuses.
        """
        rpc.wait_until_ready(self._channel, self._settings)
        response = self._stub.RegisterServer(
            membership_pb2.RegisterServerRequest(server=self._description)
        )
        self._lease_id = response.lease_id
        self._events = self._jobs.WatchServer(jobs_pb2.WatchServerRequest(lease_id=self._lease_id))
        for name, target in (
            ("distca-heartbeat", lambda: self._beat(response.lease_seconds)),
            ("distca-watch", self._watch),
        ):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        logger.info(
            "server %s registered at %s", self._description.server_id, self._settings.address
        )

    def report(self, busy: StepBusy) -> None:
        """Sends the busy seconds of a finished step; a failure is logged only."""
        if self._leaving.is_set():
            return
        request = jobs_pb2.ReportStepRequest(
            job_id=busy.job_id,
            step=busy.step,
            lease_id=self._lease_id,
            server=jobs_pb2.ServerMeasurement(
                server_id=self._description.server_id,
                forward_busy_seconds=busy.forward_seconds,
                backward_busy_seconds=busy.backward_seconds,
            ),
        )
        future: Future[object] = self._outbox.submit(self._jobs.ReportStep, request)
        future.add_done_callback(rpc.log_lost_report)

    def drain(self) -> None:
        """Asks the control plane to plan nothing more for the server; a failure is logged only."""
        request = membership_pb2.DrainServerRequest(
            server_id=self._description.server_id, lease_id=self._lease_id
        )
        try:
            self._stub.DrainServer(request)
        except rpc.RpcError as error:
            logger.warning("asking to be drained: %s", error)

    def leave(self) -> None:
        """Ends the lease and the threads. Idempotent."""
        if self._leaving.is_set():
            return
        self._leaving.set()
        self._outbox.shutdown(wait=True, cancel_futures=False)
        if not self._lost.is_set() and self._lease_id:
            try:
                self._stub.DeregisterServer(
                    membership_pb2.DeregisterServerRequest(lease_id=self._lease_id)
                )
            except rpc.RpcError as error:
                logger.warning("deregistering: %s", error)
        if self._events is not None:
            self._events.cancel()
        self._channel.close()
        for thread in self._threads:
            thread.join(2.0)

    def _beat(self, lease_seconds: float) -> None:
        draining = False
        while not self._leaving.wait(lease_seconds / 3):
            with self._losing("heartbeat"):
                response = self._stub.Heartbeat(
                    membership_pb2.HeartbeatRequest(lease_id=self._lease_id, load=self._load())
                )
                lease_seconds = response.lease_seconds
                if response.draining and not draining:
                    draining = True
                    self._on_drain()
            if self._lost.is_set():
                return

    def _watch(self) -> None:
        assert self._events is not None
        with self._losing("plans"):
            for event in self._events:
                self._on_event(event)
            if not self._leaving.is_set():
                raise MembershipLost("the control plane ended the stream")

    @contextmanager
    def _losing(self, what: str) -> Iterator[None]:
        """Turns any failure of a thread into one call of ``on_lost``."""
        try:
            yield
        except Exception as error:
            if self._leaving.is_set() or self._lost.is_set():
                return
            self._lost.set()
            logger.error("membership lost (%s): %s", what, error)
            self._on_lost(MembershipLost(f"{what}: {error}"))
