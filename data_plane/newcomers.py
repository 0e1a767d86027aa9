"""Clients of a listener between their arrival and its verdict: bounded in time and number."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from data_plane.base_connection import BaseConnection
from data_plane.half_open import HalfOpen
from data_plane.handshake import HandshakeFailure, HelloVerdict, ListenerHandshake, refusal
from data_plane.owner_thread import OwnerThread
from data_plane.proof import Ends
from data_plane.transport import AcceptCallback, TransportError

logger = logging.getLogger(__name__)

_REJECTION_LINGER_SECONDS: Final = 1.0
"""How long a refused client has to read the reason: closing at once would take it back."""


class Newcomers:
    """Those of one listener. Used on the owner thread.

    Args:
        owner: runs what is due later.
        limit: clients that may be about to say hello, or about to read that they are refused.
        timeout_seconds: how long a client may take to say hello.
        on_refused: called for each client that is not taken in.
    """

    def __init__(
        self,
        owner: OwnerThread,
        *,
        limit: int,
        timeout_seconds: float,
        on_refused: Callable[[HandshakeFailure], None],
    ) -> None:
        self._owner = owner
        self._timeout_seconds = timeout_seconds
        self._on_refused = on_refused
        self._half_open: HalfOpen[BaseConnection] = HalfOpen(limit)

    def challenge(
        self,
        connection: BaseConnection,
        host: str,
        ends: Ends,
        accept: AcceptCallback,
        on_proven: Callable[[], None] = lambda: None,
    ) -> None:
        """Sends a client that has come the challenge, and judges it by its answer.

        Args:
            connection: the client's; closed if it says nothing in time, or is one too many.
            host: where it comes from.
            ends: both addresses, as this side sees them.
            accept: judges what it claims.
            on_proven: called before the answer to a client that is taken in.
        """
        judged = self._enter(connection, host)
        handshake = ListenerHandshake(ends)

        def conclude(verdict: HelloVerdict) -> None:
            judged()
            if verdict.keys is not None:
                on_proven()
                self._half_open.leave(connection)
                logger.info("connection %d with %s accepted", connection.local_id, connection.peer)
                connection.begin(verdict.keys, listening=True)
            else:
                self._refuse(connection, verdict)
            connection.send_greeting(verdict.greeting)

        connection.send_greeting(handshake.challenge)
        connection.receive_greeting(
            lambda greeting: conclude(handshake.judge(accept, greeting, connection)),
            lambda bad: conclude(refusal(HandshakeFailure.MALFORMED, f"the hello {bad}")),
        )

    def _enter(self, connection: BaseConnection, host: str) -> Callable[[], None]:
        """Counts a client that has come; returns what to call once there is a verdict on it."""
        seconds = self._timeout_seconds
        failure: HandshakeFailure | None = HandshakeFailure.LOST

        def on_deadline() -> None:
            nonlocal failure
            failure = HandshakeFailure.TIMEOUT
            connection.close(f"no hello within {seconds} s")

        def put_out() -> None:
            nonlocal failure
            if failure is not None:
                failure = HandshakeFailure.NO_ROOM
            connection.close("too many clients have not said hello")

        def on_closed(error: TransportError | None) -> None:
            timer.cancel()
            self._half_open.leave(connection)
            if failure is not None:
                self._on_refused(failure)

        def judged() -> None:
            nonlocal failure
            failure = None
            timer.cancel()

        timer = self._owner.call_at(time.monotonic() + seconds, on_deadline)
        connection.add_closed_callback(on_closed)
        self._half_open.enter(connection, host, put_out)
        return judged

    def _refuse(self, connection: BaseConnection, verdict: HelloVerdict) -> None:
        """Closes the connection of a refused client, when it has had the time to read why."""
        assert verdict.failure is not None
        self._on_refused(verdict.failure)
        reason = verdict.reason
        logger.info("connection with %s refused: %s", connection.peer, reason)
        self._owner.call_at(
            time.monotonic() + _REJECTION_LINGER_SECONDS,
            lambda: connection.close(f"refused: {reason}"),
        )

    def put_one_out(self) -> bool:
        """See :meth:`HalfOpen.put_one_out`."""
        return self._half_open.put_one_out()
