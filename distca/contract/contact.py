"""One contact with a control plane: a channel, and at most one stream of events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import grpc

from distca.contract import rpc
from distca.contract.timeouts import default_seconds
from distca.v1 import jobs_pb2_grpc, membership_pb2_grpc

RENEWAL_SECONDS = default_seconds("renewal_seconds")
"""How long the renewal of a lease may take. It notices a control plane that is stopped: its
connection stays, and its stream is silent like any other without news."""


class Contact:
    """A control plane that answers, from reaching it to losing it.

    Args:
        settings: how to reach it.
        token: gives the job's token, which goes with every call; none if it is empty.

    Attributes:
        LOST: the control plane has started again, or has taken this member for dead: a new contact
            may do better.
        settings: how it was reached.
        lease_id, lease_seconds: once it gave a lease.
        events: once it is watched.
    """

    LOST: ClassVar[frozenset[rpc.Reason]] = frozenset()

    def __init__(self, settings: rpc.RpcSettings, token: Callable[[], bytes] = lambda: b"") -> None:
        self.settings = settings
        self.lease_id = ""
        self.lease_seconds = 0.0
        self.events: rpc.EventStream | None = None
        self._channel: grpc.Channel = rpc.open_channel(settings, token)
        self._jobs = jobs_pb2_grpc.JobsStub(self._channel)
        self._membership = membership_pb2_grpc.MembershipStub(self._channel)
        self._lock = threading.Lock()
        self._under_way: set[Any] = set()
        self._is_ended = False
        try:
            rpc.wait_until_ready(self._channel, settings)
        except BaseException:
            self._channel.close()
            raise

    @property
    def address(self) -> str:
        """``host:port`` of the control plane."""
        return self.settings.address

    @property
    def renewal_seconds(self) -> float:
        """When to renew the lease."""
        return self.lease_seconds / 3

    @property
    def renewal_deadline_seconds(self) -> float | None:
        """How long that may take. A lease that is not known yet has the deadline of other calls."""
        return min(self.renewal_seconds, RENEWAL_SECONDS) or None

    def call(self, method: Any, request: Any, *, timeout_seconds: float | None = None) -> Any:
        """Makes a call: ``method`` of one of the stubs."""
        with self._lock:
            if self._is_ended:
                raise rpc.RpcError(
                    rpc.Reason.CANCELLED, "a call", self.address, "the contact has ended"
                )
            call = method.future(request, timeout=timeout_seconds)
            self._under_way.add(call)
        try:
            return call.result()
        finally:
            with self._lock:
                self._under_way.remove(call)
                is_last = self._is_ended and not self._under_way
            if is_last:
                self._channel.close()

    def is_lost_by(self, error: rpc.RpcError) -> bool:
        """Decides whether to find the control plane again and repeat the call."""
        return error.reason.is_transient or error.reason in self.LOST

    def interrupt(self) -> None:
        """Ends the stream of events; the thread that reads it goes on with what is next."""
        if self.events is not None:
            self.events.cancel()

    def retire(self) -> None:
        """Ends the stream of events, and everything when the calls under way are over: there is a
        new contact."""
        self._close(cancel=False)

    def end(self) -> None:
        """Ends everything; calls under way are cancelled. Idempotent."""
        self._close(cancel=True)

    def _close(self, *, cancel: bool) -> None:
        """The channel is closed when the last call has returned: gRPC may crash if one thread
        begins a call while another closes its channel."""
        self.interrupt()
        with self._lock:
            is_first, self._is_ended = not self._is_ended, True
            under_way = list(self._under_way)
        if cancel:
            for call in under_way:
                call.cancel()
        if is_first and not under_way:
            self._channel.close()
