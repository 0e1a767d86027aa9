"""Answers of servers to ``grpc.health.v1``.

The servicers of the package ``grpcio-health-checking`` keep something for every name that a client
watches, and write to a watcher while they hold what a change of status needs: a client that reads
nothing would keep a control plane from taking over. These know their services, keep nothing for
others, and wait for no reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

Status = health_pb2.HealthCheckResponse.ServingStatus

OVERALL: Final = ""
"""Names the process as a whole."""


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The health of a server on an event loop: NOT_SERVING at first; it lives on that loop.

    Args:
        services: full names of what it answers for; :data:`OVERALL` besides. Others are NOT_FOUND.
    """

    def __init__(self, services: Iterable[str] = ()) -> None:
        self._services = frozenset({OVERALL, *services})
        self._serves = False
        self._is_over = False
        self._changed = asyncio.Event()

    @property
    def serves(self) -> bool:
        """True while it answers SERVING; any thread may read it."""
        return self._serves

    def serving(self) -> None:
        """From now on SERVING, unless it is over."""
        self._change(not self._is_over)

    def over(self) -> None:
        """From now on NOT_SERVING, for good."""
        self._is_over = True
        self._change(False)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        await self._check_known(request, context)
        return _answer(self._serves)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        await self._check_known(request, context)
        told: bool | None = None
        while True:
            changed = self._changed
            if self._serves != told:
                told = self._serves
                await context.write(_answer(told))
            elif self._is_over:
                return
            else:
                await changed.wait()

    async def _check_known(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, _UNKNOWN)

    def _change(self, serves: bool) -> None:
        self._serves = serves
        self._changed.set()
        self._changed = asyncio.Event()


_UNKNOWN = "this server has no service of that name; an empty name asks for the process as a whole"


def _answer(serves: bool) -> health_pb2.HealthCheckResponse:
    return health_pb2.HealthCheckResponse(status=Status.SERVING if serves else Status.NOT_SERVING)
