"""A rank's connections to the servers of its plans."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import SystemRandom

from core_attention.plan import Plan, PlanServer
from data_plane.transport import (
    Address,
    ConnectFailed,
    Connection,
    HandshakeRejected,
    NetworkRestarted,
    Transport,
    TransportError,
)
from distca.contract.addresses import split_address
from distca.v1 import data_plane_pb2
from trainer_client.options import SessionOptions

logger = logging.getLogger(__name__)

_PROBE_REPEATS = 4
_ATTEMPT_SECONDS = 2.0
_FIRST_PAUSE_SECONDS = 0.05

MakeHello = Callable[[PlanServer, int, int], bytes]
"""The first message to a server, for a first step and an epoch."""


_AT_ONCE = 32
"""Connections that are made at a time."""


class Unreachable(Exception):
    """Servers of a plan cannot be connected to.

    Attributes:
        causes: why, by server id.
    """

    def __init__(self, causes: Mapping[str, TransportError]) -> None:
        super().__init__(
            "; ".join(f"server {name} cannot be reached: {why}" for name, why in causes.items())
        )
        self.causes = causes


class NotWanted(Exception):
    """Connections for this plan are of no use any more: a recovery has begun, or its step was given
    up."""


class ServerLinks:
    """Connections by server. Thread-safe.

    Args:
        transport: connects.
        options: of the session.
        make_hello: makes the first message.
        token: gives the rank's token, which both sides prove to know.
    """

    def __init__(
        self,
        transport: Transport,
        options: SessionOptions,
        make_hello: MakeHello,
        token: Callable[[], bytes],
    ) -> None:
        self._transport = transport
        self._options = options
        self._make_hello = make_hello
        self._token = token
        self._lock = threading.Lock()
        # Held while connecting, so that two threads do not connect to one server at a time.
        self._connecting = threading.Lock()
        self._connections: dict[str, Connection] = {}
        self._probed: set[str] = set()

    def close_all(self, why: str, *, finished: bool = False) -> None:
        """Closes all connections, at the end of the job if ``finished``."""
        with self._lock:
            closing, self._connections = self._connections, {}
        for connection in closing.values():
            connection.close(why, finished=finished)

    def connected_to(self, plan: Plan) -> Mapping[str, Connection]:
        """The open connections to servers of ``plan``."""
        with self._lock:
            known = {each.server_id: self._connections.get(each.server_id) for each in plan.servers}
        return {name: each for name, each in known.items() if each and not each.closed}

    def connect(
        self, plan: Plan, first_step: int, *, wanted: Callable[[], bool]
    ) -> Mapping[str, Connection]:
        """Connections to the servers of ``plan``, but for this process's own.

        Args:
            plan: this rank's slice.
            first_step: the first step whose ticks are sent on new connections.
            wanted: whether the plan is still to be run. Servers take the ticks of a connection
                from its first step on, so that none may be left open that is not wanted. Who
                makes it false closes all connections then.

        Raises:
            Unreachable: some of them cannot be connected to; names all that cannot.
            NotWanted: the plan is not ``wanted`` any more.
        """
        others = [s for s in plan.servers if s.in_place_rank != self._options.rank]
        with self._connecting:
            attempt = _Attempt(plan, first_step, wanted)
            attempt.check()
            connections = {
                server.server_id: known
                for server in others
                if (known := self._connections.get(server.server_id)) and not known.closed
            }
            missing = [server for server in others if server.server_id not in connections]
            try:
                made = self._connect_all(missing, attempt)
            except Unreachable:
                attempt.check()
                raise
            self._probe_all(made)
        return connections | made

    def _connect_all(
        self, servers: Sequence[PlanServer], attempt: _Attempt
    ) -> dict[str, Connection]:
        """Connects to all at a time, so that several that are dead cost the wait for one of them.
        Raises as :meth:`connect`."""
        if not servers:
            return {}
        made: dict[str, Connection] = {}
        causes: dict[str, TransportError] = {}
        with ThreadPoolExecutor(
            min(len(servers), _AT_ONCE), thread_name_prefix="distca-connect"
        ) as threads:
            results = [
                (server.server_id, threads.submit(self._connect, server, attempt))
                for server in servers
            ]
        for server_id, result in results:
            try:
                made[server_id] = result.result()
            except TransportError as error:
                causes[server_id] = error
        if causes:
            raise Unreachable(causes)
        return made

    def _connect(self, server: PlanServer, attempt: _Attempt) -> Connection:
        """Raises TransportError, or NotWanted."""
        attempt.check()
        hello = self._make_hello(server, attempt.first_step, attempt.plan.epoch)
        began = time.monotonic()
        try:
            connection = self._call(
                Address(*split_address("data_address", server.address)),
                hello,
                attempt,
                self._patience_with(server),
            )
        except TransportError as error:
            attempt.check()
            if _knows_a_later_epoch(error):
                # The server knows of a recovery that this rank receives in a moment.
                raise NotWanted(str(error)) from error
            raise
        logger.debug("server %s connected in %.3f s", server.server_id, time.monotonic() - began)
        connection.show_as(server.server_id)
        with self._lock:
            self._connections[server.server_id] = connection
        try:
            # After it is listed: either this sees that it is not wanted, or it is closed with all.
            attempt.check()
        except NotWanted as error:
            self._close(server.server_id, str(error))
            raise
        return connection

    def _patience_with(self, server: PlanServer) -> float:
        """How long a server may say nothing."""
        options = self._options
        is_pool = server.in_place_rank is None
        timeout = options.ping_timeout_seconds if is_pool else options.rank_ping_seconds
        return min(options.ping_quiet_seconds + timeout, options.connect_timeout_seconds)

    def _call(
        self, address: Address, hello: bytes, attempt: _Attempt, patience: float
    ) -> Connection:
        """Connects. A server that says nothing, or refuses without a proof that it is one of ours,
        is given up as one that answers no ping; one that does not know the job yet may take longer:
        jobs and plans reach servers and ranks over streams of their own, so a rank may be faster.

        Raises:
            TransportError: no connection.
            NotWanted: the plan is not wanted any more.
        """
        options = self._options
        attempt_seconds = min(_ATTEMPT_SECONDS, patience)
        began = heard_at = time.monotonic()
        longest_pause = _FIRST_PAUSE_SECONDS
        while True:
            attempt.check()
            tried_at = time.monotonic()
            try:
                # In pieces, since what waits here is in the way of the next recovery.
                connected = self._transport.connect(
                    address, hello, attempt_seconds, secret=self._token()
                )
                return connected[0]
            except HandshakeRejected as error:
                heard_at = time.monotonic()
                waits = options.connect_timeout_seconds if _job_not_there_yet(error) else patience
                if error.proven or heard_at - began > waits:
                    raise
                time.sleep(SystemRandom().uniform(0.0, longest_pause))
                longest_pause = min(2 * longest_pause, 1.0)
            except NetworkRestarted:
                if time.monotonic() - began > patience:
                    raise
            except ConnectFailed:
                now = time.monotonic()
                if now - tried_at < attempt_seconds or now - heard_at > patience:
                    raise

    def _close(self, server_id: str, why: str) -> None:
        with self._lock:
            connection = self._connections.pop(server_id, None)
        if connection is not None:
            connection.close(why)

    def _probe_all(self, made: Mapping[str, Connection]) -> None:
        """Measures the bandwidth to servers that are met for the first time, one after the other:
        they share this process's network. Raises as :meth:`connect`."""
        causes = {}
        for server_id, connection in made.items():
            if not self._options.probe_bytes or server_id in self._probed:
                continue
            try:
                self._probe(server_id, connection)
            except TransportError as error:
                causes[server_id] = error
        if causes:
            raise Unreachable(causes)

    def _probe(self, server_id: str, connection: Connection) -> None:
        options = self._options
        result = self._transport.probe(
            connection, options.probe_bytes, _PROBE_REPEATS, options.connect_timeout_seconds
        )
        self._probed.add(server_id)
        if result.gigabytes_per_second < options.min_gigabytes_per_second:
            logger.warning(
                "server %s is reached over %s at %.2f GB/s, below min_gigabytes_per_second %.2f",
                server_id,
                result.lanes or result.transport,
                result.gigabytes_per_second,
                options.min_gigabytes_per_second,
            )


@dataclass(frozen=True, eq=False, slots=True)
class _Attempt:
    """Connecting to the servers of a plan; see :meth:`ServerLinks.connect`."""

    plan: Plan
    first_step: int
    wanted: Callable[[], bool]

    def check(self) -> None:
        """Raises NotWanted."""
        if not self.wanted():
            raise NotWanted(
                f"the plan of epoch {self.plan.epoch} is not wanted any more: a recovery has "
                f"begun, or step {self.plan.step} was given up"
            )


def _knows_a_later_epoch(error: TransportError) -> bool:
    over = data_plane_pb2.HELLO_REFUSAL_EPOCH_OVER
    return isinstance(error, HandshakeRejected) and error.proven and error.code == over


def _job_not_there_yet(error: HandshakeRejected) -> bool:
    return error.code == data_plane_pb2.HELLO_REFUSAL_UNKNOWN
