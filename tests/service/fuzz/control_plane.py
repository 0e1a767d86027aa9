"""The gRPC handlers of the control plane, in this process: raw bytes in, as the network gives them.

Every call goes through what the real server has: the gate, the deserializer, the handler. Requests
are templates with ids of real members and jobs, of which most get mutated.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from control_plane.access.access import AccessInterceptor, Gate
from control_plane.access.calls_in_flight import CallsInFlight
from control_plane.access.connections import Connections
from control_plane.access.fair_threads import FairThreads
from control_plane.access.rate_limit import RateLimit
from control_plane.jobs.coordinator import Coordinator
from control_plane.metrics.metrics import Metrics
from control_plane.service.refusals import Refusals
from control_plane.service.service import JobsService, MembershipService
from control_plane.settings import CoordinatorSettings
from core_attention.manifest import RankManifest
from distca.contract.codec import plan_from_proto, rank_manifest_to_proto
from distca.contract.tokens import JOB_TOKEN_KEY
from distca.process.monitoring import process_registry
from distca.v1 import jobs_pb2, jobs_pb2_grpc, membership_pb2, membership_pb2_grpc
from tests.service.fuzz.mutation import mutated_raw, random_bytes
from tests.support.service_harness import (
    job_spec,
    rank_manifest,
    rotating_plan,
    server_description,
)

BUGS = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
REQUESTS: dict[str, type[Message]] = {
    f"/{service.full_name}/{method.name}": method.input_type._concrete_class
    for file in (membership_pb2, jobs_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


class Members(Protocol):
    """Names that requests may hold."""

    jobs: list[str]
    leases: list[str]
    tokens: list[bytes | None]


class Aborted(Exception):
    """What ``context.abort`` raises."""


class FakeContext:
    """One call's context, as gRPC's asyncio server gives it to a handler."""

    def __init__(self, token: bytes | None) -> None:
        self._token = token
        self.status = grpc.StatusCode.OK
        self.written: list[Message] = []

    def auth_context(self) -> dict[str, Any]:
        return {}

    def invocation_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return () if self._token is None else ((JOB_TOKEN_KEY, self._token),)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:9"

    async def abort(self, status: grpc.StatusCode, details: str, metadata: Any = ()) -> None:
        # gRPC sends both as they are.
        details.encode()
        self.status = status
        raise Aborted

    async def write(self, event: bytes) -> None:
        self.written.append(jobs_pb2.PlanEvent.FromString(event))


class _Recorder:
    """Takes the place of a server: keeps the handlers that are added."""

    def __init__(self) -> None:
        self._handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """The same handlers, for a faster look-up."""

    async def find(self, details: Any) -> Any:
        found = (handler.service(details) for handler in self._handlers)
        return next((one for one in found if one is not None), None)


class _Details:
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


class InProcess:
    """A coordinator with its services, and members that it knows."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = 1000.0
        self.loop = loop
        metrics = Metrics(process_registry("control-plane"))
        settings = CoordinatorSettings(default_planner="rotating", lease_seconds=15.0)
        self.coordinator = Coordinator(
            settings, {"rotating": rotating_plan}, metrics, lambda: self.now
        )
        limit = RateLimit(per_second=1e9, burst=10**9)
        gate = Gate(self.coordinator, limit, lambda: self.now, certificates_required=False)
        refusals = Refusals(metrics.registry, lambda: self.now)
        connections = Connections(lambda: self.now, patience_seconds=10.0)
        interceptor = AccessInterceptor(gate, CallsInFlight(10**6), refusals, connections)
        recorder: Any = _Recorder()
        jobs_pb2_grpc.add_JobsServicer_to_server(
            JobsService(self.coordinator, FairThreads(1, "messages"), refusals), recorder
        )
        membership_pb2_grpc.add_MembershipServicer_to_server(
            MembershipService(self.coordinator), recorder
        )
        self._handlers = {
            method: loop.run_until_complete(
                interceptor.intercept_service(recorder.find, _Details(method))
            )
            for method in REQUESTS
        }
        self.leases: list[str] = [""]
        self.jobs: list[str] = ["", "nobody"]
        self.tokens: list[bytes | None] = [None, b"", b"no token"]
        self._good_jobs = 0

    def call(self, method: str, raw: bytes, token: bytes | None) -> tuple[grpc.StatusCode, Any]:
        """One call: its status, and its answer or the events of a stream's first moment.

        Raises:
            Exception: the handler raised something that no client understands.
        """
        context = FakeContext(token)
        handler = self._handlers[method]
        request = handler.request_deserializer(raw)
        if handler.response_streaming:
            return context.status, self._watch(handler, request, context)
        try:
            answer = self.loop.run_until_complete(handler.unary_unary(request, context))
        except Aborted:
            if context.status in BUGS:
                raise AssertionError(f"{method} ended with {context.status}") from None
            return context.status, None
        handler.response_serializer(answer)
        return context.status, answer

    def good(self, method: str, request: Message, token: bytes | None = None) -> Any:
        """A call that must succeed."""
        status, answer = self.call(method, request.SerializeToString(), token)
        assert status is grpc.StatusCode.OK, f"{method}: {status}"
        return answer

    def open_good_job(self) -> list[tuple[str, str, bytes]]:
        """Opens a job of two ranks: job, lease and token of each."""
        self._good_jobs += 1
        opened = []
        for rank in range(2):
            answer = self.good(
                "/distca.v1.Jobs/OpenJob",
                jobs_pb2.OpenJobRequest(
                    spec=_spec(f"good-{self._good_jobs}"),
                    rank=rank,
                    host="host",
                    in_place_server=server_description(f"good-{self._good_jobs}.rank-{rank}"),
                ),
            )
            opened.append((answer.job_id, answer.rank_lease_id, answer.token))
            self.jobs.append(answer.job_id)
            self.leases.append(answer.rank_lease_id)
            self.tokens.append(answer.token)
        return opened

    def check_still_serves(self) -> None:
        """A job of honest ranks is planned as if nothing had happened."""
        self.good(
            "/distca.v1.Membership/RegisterServer",
            membership_pb2.RegisterServerRequest(server=server_description("good-server")),
        )
        ranks = self.open_good_job()
        for step in range(2):
            for rank, (job, lease, token) in enumerate(ranks):
                manifest = rank_manifest_to_proto(rank_manifest(step, rank))
                request = jobs_pb2.WatchRankRequest(job_id=job, rank_lease_id=lease)
                request.hand_in.manifest.CopyFrom(manifest)
                self.good("/distca.v1.Jobs/WatchRank", request, token)
        self._wait_until(lambda: self.coordinator.job(ranks[0][0]).planned_step == 1)
        for rank, (job, lease, token) in enumerate(ranks):
            request = jobs_pb2.WatchRankRequest(job_id=job, rank_lease_id=lease)
            planned = self._planned(request, token)
            assert [p.plan.manifest.step for p in planned] == [0, 1]
            for step, message in enumerate(planned):
                planned_manifest = plan_from_proto(message.plan).manifest
                mine = planned_manifest.segment_rank == rank
                sent = rank_manifest(step, rank)
                tokens = sum(s.length for segments in sent.nano_batches for s in segments)
                assert int(planned_manifest.segment_length[mine].sum()) == tokens

    def let_run(self) -> None:
        """Lets planning threads and timers have their turn."""
        self.loop.run_until_complete(asyncio.sleep(0))

    def close(self) -> None:
        self.loop.run_until_complete(self.coordinator.shut_down())

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(2000):
            if condition():
                return
            self.loop.run_until_complete(asyncio.sleep(0.005))
        raise AssertionError("an honest job's step was not planned in 10 s")

    def _planned(self, request: jobs_pb2.WatchRankRequest, token: bytes) -> list[Any]:
        """The two steps of a rank whose job is planned. Its slices are cut on a thread."""
        handler = self._handlers["/distca.v1.Jobs/WatchRank"]
        context = FakeContext(token)

        def planned() -> list[Any]:
            events: Any = context.written
            return [e.step_planned for e in events if e.WhichOneof("event") == "step_planned"]

        self._watch(handler, request, context, lambda: len(planned()) == 2)
        return planned()

    async def _twice(self, request: Any) -> AsyncIterator[Any]:
        """A stream of requests: what the first one says beside the names is not looked at."""
        yield request
        yield request

    def _watch(
        self,
        handler: Any,
        request: Any,
        context: FakeContext,
        has_all: Callable[[], bool] = lambda: True,
    ) -> list[Message]:
        """The events that are there at once, or once it ``has_all``; then the reader goes."""

        async def read() -> None:
            if handler.request_streaming:
                answer = handler.stream_stream(self._twice(request), context)
            else:
                answer = handler.unary_stream(request, context)
            task = asyncio.ensure_future(answer)
            for _ in range(4):
                await asyncio.sleep(0)
            for _ in range(2000):
                if has_all():
                    break
                await asyncio.sleep(0.005)
            task.cancel()
            try:
                await task
            except (asyncio.CancelledError, Aborted):
                assert context.status not in BUGS, context.status

        self.loop.run_until_complete(read())
        for event in context.written:
            handler.response_serializer(event)
        return context.written


class ControlPlaneTarget:
    """The handlers of both services."""

    name = "control-plane"
    share = 0.55
    batch = 2000

    def __init__(self) -> None:
        self._methods = list(REQUESTS)

    @contextmanager
    def fresh(self) -> Iterator[Callable[[random.Random], str]]:
        loop = asyncio.new_event_loop()
        served = InProcess(loop)
        served.open_good_job()

        def case(rng: random.Random) -> str:
            if rng.random() < 0.01:
                served.let_run()
            if rng.random() < 0.002:
                served.now += rng.choice((1.0, 20.0))
                served.coordinator.sweep()
            method = rng.choice(self._methods)
            token = rng.choice(served.tokens) if rng.random() < 0.9 else random_bytes(rng, 40)
            request = template(method, served, rng)
            wrong = rng.random() < 0.85
            raw = mutated_raw(request, rng) if wrong else request.SerializeToString()
            status, answer = served.call(method, raw, token)
            _remember(served, method, answer)
            return str(status.name.lower())

        try:
            yield case
            served.check_still_serves()
        finally:
            served.close()
            loop.close()


def _spec(name: str) -> jobs_pb2.JobSpec:
    return job_spec(name, placement=jobs_pb2.PLACEMENT_MIXED)


def _remember(served: InProcess, method: str, answer: Any) -> None:
    """Leases, jobs and tokens that were given, so that later requests get further."""
    if method.endswith("RegisterServer") and answer is not None:
        served.leases.append(answer.lease_id)
    elif method.endswith("OpenJob") and answer is not None:
        served.leases.append(answer.rank_lease_id)
        served.jobs.append(answer.job_id)
        served.tokens.append(answer.token)


def template(method: str, served: Members, rng: random.Random) -> Any:
    """A request that may be right: its fields hold what members have been told."""
    kind = REQUESTS[method]
    request: Any = kind()
    fields = request.DESCRIPTOR.fields_by_name
    if "job_id" in fields:
        request.job_id = rng.choice(served.jobs)
    for name in ("lease_id", "rank_lease_id"):
        if name in fields:
            setattr(request, name, rng.choice(served.leases))
    if "step" in fields:
        request.step = rng.choice((0, 1, 2, 2**40))
    if "server_id" in fields:
        request.server_id = rng.choice(("server-1", "good-server", "good-1.rank-0"))
    if "epoch" in fields:
        request.epoch = rng.choice((0, 1, 2, 2**40))
    match method.rpartition("/")[2]:
        case "RegisterServer":
            request.server.CopyFrom(server_description(f"server-{rng.randrange(4)}"))
        case "OpenJob":
            name = f"job-{rng.randrange(6)}"
            request.spec.CopyFrom(_spec(name))
            request.rank, request.host = rng.randrange(2), "host"
            request.in_place_server.CopyFrom(server_description(f"{name}.rank-{request.rank}"))
            if rng.random() < 0.2:
                request.resume.job_id = rng.choice(served.jobs)
                request.resume.epoch = rng.choice((0, 5, 2**50))
        case "WatchRank" if rng.random() < 0.3:
            request.progress.epoch = rng.choice((0, 1, 2, 2**40))
            for step in range(rng.randrange(3)):
                ticks = [rng.randrange(9), rng.randrange(9)]
                request.progress.steps.add(step=step, complete_ticks=ticks)
        case "WatchRank":
            hand_in = request.hand_in
            manifest = rank_manifest(rng.randrange(6), rng.randrange(2))
            hand_in.manifest.CopyFrom(rank_manifest_to_proto(manifest))
            if rng.random() < 0.5:
                lengths = [[9, 5], [3] * rng.randrange(2)]
                whole = RankManifest.from_lengths(rng.randrange(6), rng.randrange(2), lengths)
                hand_in.manifest.CopyFrom(rank_manifest_to_proto(whole))
                hand_in.joining.sequence = rng.choice((0, 1, 2, 2**63))
                hand_in.joining.awaited = rng.random() < 0.5
                hand_in.joining.numbered = rng.random() < 0.3
                hand_in.joining.first_step = rng.choice((0, 3, 2**61, 2**63))
                hand_in.joining.open_places.extend(range(rng.randrange(3)))
                if rng.random() < 0.5:
                    hand_in.joining.round = rng.choice((0, 1, 2**63))
        case "ReportStep" if rng.random() < 0.5:
            request.server.server_id = "server-1"
            request.server.forward_busy_seconds.extend((1.0, 2.0))
            request.server.backward_busy_seconds.extend((1.0, 2.0))
        case "ReportStep":
            request.rank.rank = rng.randrange(2)
            request.rank.step_seconds = 1.0
        case "Heartbeat":
            request.load.queued_tasks = 1
    return request
