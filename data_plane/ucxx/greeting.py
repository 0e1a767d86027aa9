"""Greetings on a ucxx connection, over UCX's stream API, which belongs to one endpoint.

Tags cannot carry them: UCX matches tags per worker, and before there are keys nothing tells two new
clients apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
from ucxx._lib.arr import Array

from data_plane.greeting import HEADER_BYTES, BadGreeting, Greeting, decode_header
from data_plane.proof import Ends
from data_plane.transport import Address
from data_plane.ucxx.connection import UcxxConnection
from data_plane.ucxx.endpoint_query import EndpointInfo
from data_plane.ucxx.worker import UCX_ERRORS

logger = logging.getLogger(__name__)


def send_greeting(
    connection: UcxxConnection, greeting: Greeting, on_sent: Callable[[], None]
) -> None:
    """Sends ``greeting``; a failure to do so fails the connection. Owner thread."""
    memory = np.frombuffer(greeting.encode(), dtype=np.uint8)

    def on_complete(error: Exception | None) -> None:
        if not connection.closed and error is None:
            on_sent()

    _submit(connection, "stream_send", memory, on_complete)


def receive_greeting(
    connection: UcxxConnection,
    on_greeting: Callable[[Greeting], None],
    on_bad: Callable[[BadGreeting], None],
) -> None:
    """Receives one greeting and calls one of the callbacks, or neither when the connection ends
    first. Never holds more than MAX_BODY_BYTES. Owner thread."""
    head = np.zeros(HEADER_BYTES, dtype=np.uint8)

    def on_head(error: Exception | None) -> None:
        if connection.closed or error is not None:
            return
        try:
            header = decode_header(head.tobytes())
        except BadGreeting as bad:
            on_bad(bad)
            return
        body = np.zeros(header.body_bytes, dtype=np.uint8)

        def on_body(error: Exception | None) -> None:
            if connection.closed or error is not None:
                return
            on_greeting(header.with_body(body.tobytes()))

        if header.body_bytes == 0:
            on_body(None)
        else:
            _submit(connection, "stream_recv", body, on_body)

    _submit(connection, "stream_recv", head, on_head)


def ends_of(info: EndpointInfo, *, listening: bool) -> Ends:
    """Both ends of an endpoint, as this side sees them."""
    client, server = (info.remote, info.local) if listening else (info.local, info.remote)
    return Ends(client=_name(client), server=_name(server))


def _name(socket_address: tuple[str, int]) -> str:
    return str(Address(*socket_address)) if socket_address[0] else ""


def _submit(
    connection: UcxxConnection,
    operation: str,
    memory: np.ndarray[tuple[int], np.dtype[np.uint8]],
    on_complete: Callable[[Exception | None], None],
) -> None:
    if connection.endpoint is None:
        return
    try:
        request = getattr(connection.endpoint, operation)(Array(memory))
    except UCX_ERRORS as error:
        # The endpoint's close callback ends the connection.
        logger.debug("%s with %s: %s", operation, connection.peer, error)
        return
    connection.worker.track(request, memory, on_complete)
