"""A rank's connections to the servers of its plans."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from core_attention.plan import Plan, PlanServer
from data_plane.metrics import DataPlaneMetrics
from data_plane.transport import (
    Address,
    ConnectFailed,
    Connection,
    HandshakeRejected,
    NetworkRestarted,
    Transport,
    TransportError,
)
from trainer_client.metrics import TrainerMetrics
from trainer_client.options import SessionOptions

logger = logging.getLogger(__name__)

_PROBE_REPEATS = 4
_ATTEMPT_SECONDS = 2.0
_FIRST_PAUSE_SECONDS = 0.05

MakeHello = Callable[[PlanServer, int, int], bytes]
"""The first message to a server, for a first step and an epoch."""


_AT_ONCE = 32
"""Connections that are made at a time."""


class ServersUnreachable(Exception):
    """Servers of a plan cannot be connected to.

    Attributes:
        causes: why, by server id.
    """

    def __init__(self, causes: Mapping[str, TransportError]) -> None:
        super().__init__(
            "; ".join(f"server {name} cannot be reached: {why}" for name, why in causes.items())
        )
        self.causes = causes


class EpochOver(Exception):
    """A recovery has begun: connections of this epoch are of no use any more."""


class ServerLinks:
    """Connections by server, all of one epoch. Thread-safe.

    Args:
        transport: connects.
        options: of the session.
        make_hello: makes the first message.
        token: gives the rank's token, which both sides prove to know.
        metrics, data_metrics: told of connections.
    """

    def __init__(
        self,
        transport: Transport,
        options: SessionOptions,
        make_hello: MakeHello,
        token: Callable[[], bytes],
        metrics: TrainerMetrics,
        data_metrics: DataPlaneMetrics,
    ) -> None:
        self._transport = transport
        self._options = options
        self._make_hello = make_hello
        self._token = token
        self._metrics = metrics
        self._data_metrics = data_metrics
        self._lock = threading.Lock()
        # Held while connecting, so that two threads do not connect to one server at a time.
        self._connecting = threading.Lock()
        self._epoch = 0
        self._connections: dict[str, Connection] = {}
        self._probed: set[str] = set()

    @property
    def epoch(self) -> int:
        """Of the last recovery."""
        return self._epoch

    def begin_epoch(self, epoch: int, why: str) -> None:
        """Closes all connections; those made from now on are of ``epoch``."""
        with self._lock:
            self._epoch = max(self._epoch, epoch)
        self.close_all(why)

    def close_all(self, why: str) -> None:
        """Closes all connections."""
        with self._lock:
            closing, self._connections = self._connections, {}
        for connection in closing.values():
            connection.close(why)

    def connect(
        self, plan: Plan, first_step: int, *, wanted: Callable[[], bool] = lambda: True
    ) -> Mapping[str, Connection]:
        """Connections to the servers of ``plan``, but for this process's own.

        Args:
            plan: this rank's slice.
            first_step: the first step whose ticks are sent on new connections.
            wanted: whether that step is still to be run. Servers take the ticks of a connection
                from its first step on, so that none may be left open whose first step was given up.

        Raises:
            ServersUnreachable: some of them cannot be connected to; names all that cannot.
            EpochOver: the plan is void, or not ``wanted`` any more.
        """
        others = [s for s in plan.servers if s.in_place_rank != self._options.rank]
        with self._connecting:
            if not wanted():
                raise EpochOver(f"step {plan.step} was given up")
            connections = {
                server.server_id: known
                for server in others
                if (known := self._connections.get(server.server_id)) and not known.closed
            }
            missing = [server for server in others if server.server_id not in connections]
            made: dict[str, Connection] = {}
            try:
                made = self._connect_all(missing, first_step, plan.epoch)
            except ServersUnreachable:
                if wanted():
                    raise
            if not wanted():
                self._close([s.server_id for s in missing], f"step {first_step} was given up")
                raise EpochOver(f"step {plan.step} was given up")
            self._probe_all(made)
        return connections | made

    def _connect_all(
        self, servers: Sequence[PlanServer], first_step: int, epoch: int
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
            attempts = [
                (server.server_id, threads.submit(self._connect, server, first_step, epoch))
                for server in servers
            ]
        for server_id, attempt in attempts:
            try:
                made[server_id] = attempt.result()
            except TransportError as error:
                causes[server_id] = error
        if causes:
            raise ServersUnreachable(causes)
        return made

    def _connect(self, server: PlanServer, first_step: int, epoch: int) -> Connection:
        """Raises TransportError, or EpochOver."""
        self._check_epoch(epoch)
        hello = self._make_hello(server, first_step, self._epoch)
        began = time.monotonic()
        try:
            connection = self._call(_address(server.address), hello, epoch)
        except TransportError as error:
            self._check_epoch(epoch)
            if isinstance(error, HandshakeRejected) and error.proven and "is over" in str(error):
                # The server knows of a recovery that this rank will hear of in a moment.
                raise EpochOver(str(error)) from error
            raise
        logger.debug("server %s connected in %.3f s", server.server_id, time.monotonic() - began)
        self._data_metrics.name_peer(connection.peer, connection.transport, server.server_id)
        connection.add_closed_callback(lambda _: self._metrics.server_left(server.server_id))
        with self._lock:
            over = self._epoch > epoch
            if not over:
                self._connections[server.server_id] = connection
        if over:
            connection.close("a recovery has begun")
            raise EpochOver(f"epoch {epoch} is over")
        return connection

    def _call(self, address: Address, hello: bytes, epoch: int) -> Connection:
        """Connects. A server that says nothing, or refuses without a proof that it is one of ours,
        is given up as one that answers no ping; one that does not know the job yet may take longer:
        jobs and plans reach servers and ranks over streams of their own, so a rank may be faster.

        Raises:
            TransportError: no connection.
            EpochOver: a recovery has begun meanwhile.
        """
        options = self._options
        patience = min(
            options.ping_quiet_seconds + options.ping_timeout_seconds,
            options.connect_timeout_seconds,
        )
        attempt_seconds = min(_ATTEMPT_SECONDS, patience)
        began = heard_at = time.monotonic()
        longest_pause = _FIRST_PAUSE_SECONDS
        while True:
            self._check_epoch(epoch)
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
                time.sleep(random.uniform(0.0, longest_pause))
                longest_pause = min(2 * longest_pause, 1.0)
            except NetworkRestarted:
                if time.monotonic() - began > patience:
                    raise
            except ConnectFailed:
                now = time.monotonic()
                if now - tried_at < attempt_seconds or now - heard_at > patience:
                    raise

    def _close(self, server_ids: list[str], why: str) -> None:
        with self._lock:
            closing = [self._connections.pop(name, None) for name in server_ids]
        for connection in closing:
            if connection is not None:
                connection.close(why)

    def _check_epoch(self, epoch: int) -> None:
        if self._epoch > epoch:
            raise EpochOver(f"epoch {epoch} is over; the job recovered with epoch {self._epoch}")

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
            raise ServersUnreachable(causes)

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


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return Address(host.strip("[]"), int(port))


def _job_not_there_yet(error: HandshakeRejected) -> bool:
    return "unknown job" in str(error)
