"""The connecting side of a handshake: challenge, hello, and the listener's answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from data_plane.addresses import connect_failed
from data_plane.base_connection import BaseConnection, nothing
from data_plane.greeting import BadGreeting, Greeting
from data_plane.handshake import ClientHandshake
from data_plane.owner_thread import OwnerResult
from data_plane.proof import Ends
from data_plane.transport import Address, HandshakeRejected, NetworkRestarted, TransportError


@dataclass(frozen=True, eq=False)
class Connector:
    """One attempt to connect. Every method is for the owner thread.

    Attributes:
        address: the listener, as errors name it.
        transport: the name of the transport.
        handshake: this side of it.
        deadline: ``time.monotonic()`` at which the attempt ends.
        result: gets the connection and the listener's answer, or an exception.
    """

    address: Address
    transport: str
    handshake: ClientHandshake
    deadline: float
    result: OwnerResult

    def greet(
        self,
        connection: BaseConnection,
        ends: Callable[[], Ends],
        *,
        on_proven: Callable[[], None] = nothing,
        on_deadline: Callable[[], None] = nothing,
    ) -> None:
        """Goes through the handshake on a connection to the listener.

        Args:
            connection: not greeted yet.
            ends: gives both addresses, as this side sees them, once the listener has spoken.
            on_proven: called before the listener's acceptance counts.
            on_deadline: called if the listener does not answer in time.
        """

        def on_late() -> None:
            self._close(connection, "deadline passed")
            on_deadline()

        timer = connection.worker.call_at(self.deadline, on_late)

        def on_closed(error: TransportError | None) -> None:
            timer.cancel()
            if isinstance(error, NetworkRestarted):
                self.result.set(error)
            self.give_up(f"the connection ended: {error}")

        def on_challenge(challenge: Greeting) -> None:
            try:
                hello = self.handshake.answer(challenge, ends())
            except BadGreeting as bad:
                on_bad(bad)
                return
            connection.send_greeting(hello, lambda: connection.receive_greeting(on_answer, on_bad))

        def on_answer(answer: Greeting) -> None:
            timer.cancel()
            self._take_answer(connection, answer, on_proven)

        def on_bad(bad: ValueError) -> None:
            self._close(connection, f"the listener's answer {bad}")

        connection.add_closed_callback(on_closed)
        connection.receive_greeting(on_challenge, on_bad)

    def give_up(self, reason: str) -> None:
        """Ends the attempt; nothing if it has ended before."""
        self.result.set(connect_failed(self.address, reason, self.transport))

    def _take_answer(
        self, connection: BaseConnection, greeting: Greeting, on_proven: Callable[[], None]
    ) -> None:
        try:
            keys, answer = self.handshake.conclude(
                greeting, transport=self.transport, peer=connection.peer
            )
        except BadGreeting as bad:
            self._close(connection, f"the listener's answer {bad}")
            return
        except HandshakeRejected as error:
            self.result.set(error)
            connection.close(error.reason)
            return
        on_proven()
        connection.begin(keys, listening=False)
        if not self.result.set((connection, answer)):
            connection.close("nobody waits for this connection any more")

    def _close(self, connection: BaseConnection, reason: str) -> None:
        self.give_up(reason)
        connection.close(reason)
