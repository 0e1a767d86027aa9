"""The gRPC services of ``proto/distca/v1``: messages in, the coordinator's answers out."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc

from control_plane.audience import RankKey
from control_plane.coordinator import Coordinator
from control_plane.errors import InvalidRequestError, RefusedError
from control_plane.requests import (
    description_from_proto,
    description_of_job,
    in_place_server_from_proto,
    load_from_proto,
    manifest_from_proto,
    rank_measurement_from_proto,
    server_measurement_from_proto,
    spec_from_proto,
    status_to_proto,
    step_to_proto,
)
from control_plane.status import refuse
from control_plane.subscriptions import Subscription
from distca.codec import plan_to_proto
from distca.tokens import rank_token
from distca.v1 import jobs_pb2, jobs_pb2_grpc, membership_pb2, membership_pb2_grpc

Context: TypeAlias = grpc.aio.ServicerContext
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


def _refusing(handler: Handler) -> Handler:
    """Turns a refusal by the coordinator into the call's gRPC status."""

    @functools.wraps(handler)
    async def call(self: Any, request: Any, context: Context) -> Any:
        try:
            return await handler(self, request, context)
        except RefusedError as error:
            return await refuse(context, error)

    return call  # type: ignore[return-value]


class MembershipService(membership_pb2_grpc.MembershipServicer):
    """Attention servers join, report and leave."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    @_refusing
    async def RegisterServer(  # noqa: N802 - named by the protocol
        self, request: membership_pb2.RegisterServerRequest, context: Context
    ) -> membership_pb2.RegisterServerResponse:
        lease_id = self._coordinator.register_server(description_from_proto(request.server))
        return membership_pb2.RegisterServerResponse(
            lease_id=lease_id, lease_seconds=self._coordinator.lease_seconds
        )

    @_refusing
    async def Heartbeat(  # noqa: N802
        self, request: membership_pb2.HeartbeatRequest, context: Context
    ) -> membership_pb2.HeartbeatResponse:
        member = self._coordinator.heartbeat(request.lease_id, load_from_proto(request.load))
        return membership_pb2.HeartbeatResponse(
            lease_seconds=self._coordinator.lease_seconds, draining=member.draining
        )

    @_refusing
    async def DrainServer(  # noqa: N802
        self, request: membership_pb2.DrainServerRequest, context: Context
    ) -> membership_pb2.DrainServerResponse:
        self._coordinator.drain(request.server_id)
        return membership_pb2.DrainServerResponse()

    @_refusing
    async def DeregisterServer(  # noqa: N802
        self, request: membership_pb2.DeregisterServerRequest, context: Context
    ) -> membership_pb2.DeregisterServerResponse:
        self._coordinator.deregister(request.lease_id)
        return membership_pb2.DeregisterServerResponse()

    @_refusing
    async def ListServers(  # noqa: N802
        self, request: membership_pb2.ListServersRequest, context: Context
    ) -> membership_pb2.ListServersResponse:
        return membership_pb2.ListServersResponse(
            servers=[
                status_to_proto(member, seconds_since_heartbeat=seconds)
                for member, seconds in self._coordinator.servers()
            ]
        )


class JobsService(jobs_pb2_grpc.JobsServicer):
    """Trainers open jobs and submit manifests; trainers and servers watch for plans."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    @_refusing
    async def OpenJob(  # noqa: N802 - named by the protocol
        self, request: jobs_pb2.OpenJobRequest, context: Context
    ) -> jobs_pb2.OpenJobResponse:
        spec = spec_from_proto(request.spec)
        in_place = in_place_server_from_proto(request, spec)
        job, lease_id = self._coordinator.open_job(spec, request.rank, request.host, in_place)
        return jobs_pb2.OpenJobResponse(
            job_id=job.job_id,
            rank_lease_id=lease_id,
            lease_seconds=self._coordinator.lease_seconds,
            token=rank_token(job.key, request.rank),
        )

    @_refusing
    async def RenewRank(  # noqa: N802
        self, request: jobs_pb2.RenewRankRequest, context: Context
    ) -> jobs_pb2.RenewRankResponse:
        self._coordinator.renew_rank(request.job_id, request.rank_lease_id)
        return jobs_pb2.RenewRankResponse(lease_seconds=self._coordinator.lease_seconds)

    @_refusing
    async def CloseJob(  # noqa: N802
        self, request: jobs_pb2.CloseJobRequest, context: Context
    ) -> jobs_pb2.CloseJobResponse:
        self._coordinator.leave_job(request.job_id, request.rank_lease_id, request.error)
        return jobs_pb2.CloseJobResponse()

    @_refusing
    async def SubmitManifest(  # noqa: N802
        self, request: jobs_pb2.SubmitManifestRequest, context: Context
    ) -> jobs_pb2.SubmitManifestResponse:
        self._coordinator.submit_manifest(
            request.job_id,
            request.rank_lease_id,
            manifest_from_proto(request.manifest),
            forward_only=request.forward_only,
        )
        return jobs_pb2.SubmitManifestResponse()

    @_refusing
    async def WatchRank(  # noqa: N802
        self, request: jobs_pb2.WatchRankRequest, context: Context
    ) -> None:
        watched = self._coordinator.watch_rank(request.job_id, request.rank_lease_id)
        await self._stream(watched, context)

    @_refusing
    async def WatchServer(  # noqa: N802
        self, request: jobs_pb2.WatchServerRequest, context: Context
    ) -> None:
        await self._stream(self._coordinator.watch_server(request.lease_id), context)

    @_refusing
    async def ReportStep(  # noqa: N802
        self, request: jobs_pb2.ReportStepRequest, context: Context
    ) -> jobs_pb2.ReportStepResponse:
        kind = request.WhichOneof("measurement")
        if kind == "server":
            self._coordinator.report_server(
                request.job_id,
                request.lease_id,
                request.step,
                server_measurement_from_proto(request.server),
            )
        elif kind == "rank":
            self._coordinator.report_rank(
                request.job_id,
                request.lease_id,
                request.step,
                rank_measurement_from_proto(request.rank),
            )
        else:
            raise InvalidRequestError("measurement is missing; give server or rank")
        return jobs_pb2.ReportStepResponse()

    @_refusing
    async def DescribeJob(  # noqa: N802
        self, request: jobs_pb2.DescribeJobRequest, context: Context
    ) -> jobs_pb2.DescribeJobResponse:
        return description_of_job(self._coordinator.job(request.job_id))

    @_refusing
    async def GetStep(  # noqa: N802
        self, request: jobs_pb2.GetStepRequest, context: Context
    ) -> jobs_pb2.GetStepResponse:
        record = self._coordinator.job(request.job_id).step(request.step)
        # Megabytes for a large job: other calls go on meanwhile.
        plan = await asyncio.to_thread(plan_to_proto, record.plan, request.job_id)
        return step_to_proto(record, plan)

    async def _stream(self, watched: tuple[RankKey | str, Subscription], context: Context) -> None:
        """Writes events until the subscription ends or the reader goes. A write waits while the
        reader takes nothing; meanwhile the subscription's queue fills up to its limit."""
        key, subscription = watched
        try:
            async for event in subscription.events():
                await context.write(event)
        finally:
            self._coordinator.unwatch(key, subscription)
