"""The connecting side of the ucxx transport: challenge, hello, and the listener's answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ucxx._lib import libucxx

from data_plane.addresses import connect_failed
from data_plane.greeting import BadGreeting, Greeting
from data_plane.handshake import ClientHandshake
from data_plane.owner_thread import OwnerResult
from data_plane.transport import Address, HandshakeRejected, NetworkRestarted, TransportError
from data_plane.ucxx.connection import TRANSPORT_NAME, UcxxConnection
from data_plane.ucxx.worker import UCX_ERRORS, UcxxWorker


class UcxxConnector:
    """One attempt to connect; answers ``result`` with (connection, answer) or an exception.

    Args:
        worker: drives it.
        address: the listener, as errors name it.
        result: who waits.
    """

    def __init__(self, worker: UcxxWorker, address: Address, result: OwnerResult) -> None:
        self._worker = worker
        self._address = address
        self._result = result

    def start(
        self,
        ip: str,
        handshake: ClientHandshake,
        deadline: float,
        open_connection: Callable[[Any, str], UcxxConnection],
    ) -> None:
        """Connects to ``ip`` until ``deadline`` (``time.monotonic()``). Owner thread."""
        try:
            endpoint = libucxx.UCXEndpoint.create(self._worker.ucp, ip, self._address.port, True)
        except UCX_ERRORS as error:
            reason = f"{type(error).__name__}: {error}"
            self._result.set(connect_failed(self._address, reason, TRANSPORT_NAME))
            return
        connection = open_connection(endpoint, str(self._address))
        timer = self._worker.call_at(deadline, lambda: self._on_deadline(connection))

        def on_closed(error: TransportError | None) -> None:
            timer.cancel()
            if isinstance(error, NetworkRestarted):
                self._result.set(error)
            self._give_up(connection, f"the connection ended: {error}")

        def on_challenge(challenge: Greeting) -> None:
            try:
                hello = handshake.answer(challenge, connection.ends(listening=False))
            except BadGreeting as bad:
                on_bad(bad)
                return
            connection.send_greeting(hello, lambda: connection.receive_greeting(on_answer, on_bad))

        def on_answer(answer: Greeting) -> None:
            timer.cancel()
            self._take_answer(connection, handshake, answer)

        def on_bad(bad: ValueError) -> None:
            self._give_up(connection, f"the listener's answer {bad}")

        connection.add_closed_callback(on_closed)
        connection.receive_greeting(on_challenge, on_bad)

    def _take_answer(
        self, connection: UcxxConnection, handshake: ClientHandshake, greeting: Greeting
    ) -> None:
        try:
            keys, answer = handshake.conclude(
                greeting, transport=TRANSPORT_NAME, peer=connection.peer
            )
        except BadGreeting as bad:
            self._give_up(connection, f"the listener's answer {bad}")
            return
        except HandshakeRejected as error:
            self._result.set(error)
            connection.close(error.reason)
            return
        connection.begin(keys, listening=False)
        if not self._result.set((connection, answer)):
            connection.close("nobody waits for this connection any more")

    def _on_deadline(self, connection: UcxxConnection) -> None:
        self._give_up(connection, "deadline passed")
        self._worker.check_shared_memory()

    def _give_up(self, connection: UcxxConnection, reason: str) -> None:
        self._result.set(connect_failed(self._address, reason, TRANSPORT_NAME))
        connection.close(reason)
