"""The gRPC services of ``proto/distca/v1``: messages in, the coordinator's answers out.

Who may call, and what becomes of a refusal, is the business of :mod:`control_plane.access.access`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc

from control_plane.access.caller import caller_of
from control_plane.access.fair_threads import FairThreads
from control_plane.errors import InvalidRequestError, RefusedError
from control_plane.jobs.coordinator import Coordinator
from control_plane.jobs.event_streams import RankKey
from control_plane.jobs.membership import checked_load
from control_plane.jobs.requests import (
    description_from_proto,
    description_of_job,
    in_place_server_from_proto,
    manifest_from_proto,
    refused_event,
    spec_from_proto,
    step_to_proto,
)
from control_plane.jobs.subscriptions import Subscription
from control_plane.service.refusals import Refusals
from distca.contract.codec import plan_to_proto
from distca.contract.identity import Role
from distca.contract.server_loss import ServerLoss, cause_from_proto
from distca.contract.tokens import rank_token
from distca.process.plain_text import MAX_REASON_CHARACTERS, plain
from distca.v1 import jobs_pb2, jobs_pb2_grpc, membership_pb2, membership_pb2_grpc

Context: TypeAlias = grpc.aio.ServicerContext


class MembershipService(membership_pb2_grpc.MembershipServicer):
    """Attention servers join, report and leave."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def RegisterServer(
        self, request: membership_pb2.RegisterServerRequest, context: Context
    ) -> membership_pb2.RegisterServerResponse:
        lease_id = self._coordinator.register_server(
            description_from_proto(request.server), replace=request.replace
        )
        return membership_pb2.RegisterServerResponse(
            lease_id=lease_id, lease_seconds=self._coordinator.lease_seconds
        )

    async def Heartbeat(
        self, request: membership_pb2.HeartbeatRequest, context: Context
    ) -> membership_pb2.HeartbeatResponse:
        member = self._coordinator.heartbeat(request.lease_id, checked_load(request.load))
        return membership_pb2.HeartbeatResponse(
            lease_seconds=self._coordinator.lease_seconds, draining=member.draining
        )

    async def DrainServer(
        self, request: membership_pb2.DrainServerRequest, context: Context
    ) -> membership_pb2.DrainServerResponse:
        identity = caller_of(context).identity
        if identity is not None and identity.role is Role.SERVER:
            self._coordinator.check_server_lease(request.server_id, request.lease_id)
        self._coordinator.drain(request.server_id)
        return membership_pb2.DrainServerResponse()

    async def ReportRankLost(
        self, request: membership_pb2.ReportRankLostRequest, context: Context
    ) -> membership_pb2.ReportRankLostResponse:
        self._coordinator.report_rank_lost(request.lease_id, request.job_id, request.rank)
        return membership_pb2.ReportRankLostResponse()

    async def DeregisterServer(
        self, request: membership_pb2.DeregisterServerRequest, context: Context
    ) -> membership_pb2.DeregisterServerResponse:
        self._coordinator.deregister(request.lease_id)
        return membership_pb2.DeregisterServerResponse()


class JobsService(jobs_pb2_grpc.JobsServicer):
    """Trainers open jobs and submit manifests; trainers and servers watch for plans.

    Args:
        coordinator: answers.
        threads: make large messages.
        refusals: counts what is not taken of a stream that goes on.
    """

    def __init__(self, coordinator: Coordinator, threads: FairThreads, refusals: Refusals) -> None:
        self._coordinator = coordinator
        self._threads = threads
        self._refusals = refusals

    async def DescribePool(
        self, request: jobs_pb2.DescribePoolRequest, context: Context
    ) -> jobs_pb2.DescribePoolResponse:
        return jobs_pb2.DescribePoolResponse(transports=self._coordinator.pool_transports())

    async def OpenJob(
        self, request: jobs_pb2.OpenJobRequest, context: Context
    ) -> jobs_pb2.OpenJobResponse:
        spec = spec_from_proto(request.spec)
        in_place = in_place_server_from_proto(request, spec)
        caller, group = caller_of(context), tuple(request.tensor_parallel_ranks)
        if request.HasField("resume"):
            job, lease_id = self._coordinator.admission.resume(
                spec,
                request.rank,
                request.host,
                in_place,
                job_id=request.resume.job_id,
                epoch=request.resume.epoch,
                token=caller.token,
                group=group,
                owner=caller.owner,
            )
        else:
            job, lease_id = self._coordinator.admission.open(
                spec,
                request.rank,
                request.host,
                in_place,
                group=group,
                owner=caller.owner,
                replace=request.replace,
            )
        return jobs_pb2.OpenJobResponse(
            job_id=job.job_id,
            rank_lease_id=lease_id,
            lease_seconds=self._coordinator.lease_seconds,
            token=rank_token(job.key, request.rank),
            stall_seconds=self._coordinator.settings.stall_seconds,
            answer_seconds=self._coordinator.settings.answer_seconds,
        )

    async def RenewRank(
        self, request: jobs_pb2.RenewRankRequest, context: Context
    ) -> jobs_pb2.RenewRankResponse:
        tells_load = request.HasField("in_place_load")
        self._coordinator.renew_rank(
            request.job_id,
            request.rank_lease_id,
            next_step=request.next_step,
            sent_ticks=request.sent_ticks,
            in_place_load=checked_load(request.in_place_load) if tells_load else None,
        )
        return jobs_pb2.RenewRankResponse(lease_seconds=self._coordinator.lease_seconds)

    async def CloseJob(
        self, request: jobs_pb2.CloseJobRequest, context: Context
    ) -> jobs_pb2.CloseJobResponse:
        self._coordinator.leave_job(request.job_id, request.rank_lease_id, _reason(request.error))
        return jobs_pb2.CloseJobResponse()

    async def WatchRank(
        self, requests: AsyncIterator[jobs_pb2.WatchRankRequest], context: Context
    ) -> None:
        first = await anext(requests, jobs_pb2.WatchRankRequest())
        watched = self._coordinator.watch_rank(first.job_id, first.rank_lease_id)
        taking = asyncio.ensure_future(self._take(requests, watched[1], caller_of(context).label))
        try:
            await self._stream(watched, context)
        finally:
            taking.cancel()

    async def _take(
        self,
        requests: AsyncIterator[jobs_pb2.WatchRankRequest],
        subscription: Subscription,
        caller: str,
    ) -> None:
        """Takes in what a rank says on its stream, which ends if the rank is not known any more."""
        try:
            async for request in requests:
                try:
                    self._take_one(request)
                except RefusedError as error:
                    if error.reason.status is grpc.StatusCode.NOT_FOUND:
                        raise
                    self._refusals.refused("Jobs/WatchRank", caller, error)
                    if request.hand_in.HasField("manifest"):
                        subscription.publish(refused_event(request.hand_in, error))
        except Exception as error:
            subscription.end(error)

    def _take_one(self, request: jobs_pb2.WatchRankRequest) -> None:
        job_id, lease_id, hand_in = request.job_id, request.rank_lease_id, request.hand_in
        if request.WhichOneof("request") == "progress":
            progress = request.progress
            self._coordinator.report_progress(job_id, lease_id, progress.epoch, progress.steps)
            return
        has_manifest = hand_in.HasField("manifest") or not hand_in.HasField("joining")
        manifest = manifest_from_proto(hand_in.manifest) if has_manifest else None
        if hand_in.HasField("joining"):
            self._coordinator.join_step(job_id, lease_id, hand_in, manifest)
        else:
            assert manifest is not None
            self._coordinator.submit_manifest(
                job_id, lease_id, manifest, forward_only=hand_in.forward_only
            )

    async def WatchServer(self, request: jobs_pb2.WatchServerRequest, context: Context) -> None:
        await self._stream(self._coordinator.watch_server(request.lease_id), context)

    async def ReportStep(
        self, request: jobs_pb2.ReportStepRequest, context: Context
    ) -> jobs_pb2.ReportStepResponse:
        kind = request.WhichOneof("measurement")
        if kind == "server":
            self._coordinator.report_server(
                request.job_id, request.lease_id, request.step, request.server
            )
        elif kind == "rank":
            self._coordinator.report_rank(
                request.job_id, request.lease_id, request.step, request.rank
            )
        elif kind == "given_up":
            self._coordinator.give_up_step(
                request.job_id,
                request.lease_id,
                request.step,
                _reason(request.given_up.reason),
            )
        elif kind == "waiting":
            self._coordinator.wait_in_step(
                request.job_id, request.lease_id, request.step, request.waiting
            )
        else:
            raise InvalidRequestError(
                "measurement is missing; give server, rank, given_up or waiting"
            )
        return jobs_pb2.ReportStepResponse()

    async def ReportServerLost(
        self, request: jobs_pb2.ReportServerLostRequest, context: Context
    ) -> jobs_pb2.ReportServerLostResponse:
        self._coordinator.report_server_lost(
            request.job_id,
            request.rank_lease_id,
            ServerLoss(
                server_id=_reason(request.server_id),
                epoch=request.epoch,
                cause=cause_from_proto(request.cause),
                detail=_reason(request.detail),
            ),
        )
        return jobs_pb2.ReportServerLostResponse()

    async def DescribeJob(
        self, request: jobs_pb2.DescribeJobRequest, context: Context
    ) -> jobs_pb2.DescribeJobResponse:
        return description_of_job(self._coordinator.job(request.job_id))

    async def GetStep(
        self, request: jobs_pb2.GetStepRequest, context: Context
    ) -> jobs_pb2.GetStepResponse:
        record = self._coordinator.job(request.job_id).step(request.step)
        # Megabytes for a large job: other calls go on meanwhile.
        caller = caller_of(context)
        plan = await self._threads.run(caller.owner, plan_to_proto, record.plan, request.job_id)
        if not caller.sees_addresses:
            for server in plan.servers:
                server.ClearField("data_address")
        return step_to_proto(record, plan)

    async def _stream(self, watched: tuple[RankKey | str, Subscription], context: Context) -> None:
        """Writes events until the subscription ends or the reader goes. A write waits while the
        reader takes nothing; meanwhile the subscription's queue fills up to its limit."""
        key, subscription = watched
        try:
            async for event in subscription.events():
                if not isinstance(event, bytes):
                    event = await self._threads.run(caller_of(context).owner, event)
                await context.write(event)
        finally:
            self._coordinator.unwatch(key, subscription)


def _reason(text: str) -> str:
    """A member's words, fit for logs and other members."""
    return plain(text, MAX_REASON_CHARACTERS)
