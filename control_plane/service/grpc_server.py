"""A grpc.aio server that lives through calls of methods that nobody serves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server as aio_server


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """Answers calls of methods that no service has, which gRPC's loop never sees.

    The loop reads their names as UTF-8, without looking, and so ends at a name that is none: any
    client can make such a call. It then lets go of requests for calls that gRPC's core still writes
    to, which corrupts memory (grpcio 1.84 and 1.85). Calls of methods that services have come by
    ``_request_registered_call``, and their names are known.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *args: Any) -> None:
        super().__init__(loop, *args)
        self._event_loop = loop
        # The loop itself holds tasks weakly.
        self._answers: set[asyncio.Task[None]] = set()

    async def _request_call(self) -> None:
        """The loop's request for the next such call: ends as the server stops, by an exception of
        gRPC's."""
        while True:
            call = await super()._request_call()
            answer = self._event_loop.create_task(self._answer(call))
            self._answers.add(answer)
            answer.add_done_callback(self._answers.discard)

    async def _answer(self, call: object) -> None:
        # A client that went away hears nothing.
        with contextlib.suppress(cygrpc.InternalError):
            await cygrpc._send_error_status_from_server(
                call,
                cygrpc.StatusCode.unimplemented,
                "Method not found!",
                (),
                cygrpc.SendInitialMetadataOperation((), 0),
                self._event_loop,
            )


def build_server(
    options: Sequence[tuple[str, Any]], interceptors: Sequence[grpc.aio.ServerInterceptor]
) -> grpc.aio.Server:
    """A server of the running event loop, to which services and ports are added."""
    whole = aio_server.cygrpc.AioServer
    aio_server.cygrpc.AioServer = _Core
    try:
        return grpc.aio.server(options=options, interceptors=interceptors)
    finally:
        aio_server.cygrpc.AioServer = whole
