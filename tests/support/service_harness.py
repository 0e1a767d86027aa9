"""A control plane in a thread of this process, and members that talk to it over real gRPC."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, cast

import grpc
import numpy as np

from control_plane.planner.planning import Planner, PlanningOptions, PlanningServer
from control_plane.server import ControlPlane
from control_plane.settings import ControlPlaneSettings, CoordinatorSettings
from core_attention.arrays import int64_column
from core_attention.ca_task import MaskKind, TaskTable
from core_attention.cost_model import CostProfile
from core_attention.manifest import Manifest, RankManifest
from core_attention.plan import PhaseForecast, Plan, PlanServer
from core_attention.shape import AttentionShape
from distca.contract.codec import profile_to_proto, rank_manifest_to_proto, shape_to_proto
from distca.contract.rpc import EventStream, Reason, RpcError, RpcSettings, open_channel
from distca.contract.tokens import JOB_TOKEN_KEY
from distca.v1 import (
    cluster_pb2_grpc,
    jobs_pb2,
    jobs_pb2_grpc,
    membership_pb2,
    membership_pb2_grpc,
    plan_pb2,
)
from tests.support.waiting import DEADLINE_SECONDS

SHAPE = AttentionShape(num_heads=8, num_heads_kv=2, head_dim=64, head_dim_v=64, dtype="bfloat16")


def linear_profile(shape: AttentionShape = SHAPE) -> CostProfile:
    """A profile whose seconds are proportional to query-key pairs."""
    return CostProfile(
        device="test device",
        kernel="test",
        shape=shape,
        q_tokens=int64_column([1, 1024], "q_tokens"),
        kv_tokens=int64_column([1, 1024], "kv_tokens"),
        forward_seconds=np.array([[1e-9, 1e-6], [5e-4, 5e-4]]),
        backward_seconds=np.array([[2e-9, 2e-6], [1e-3, 1e-3]]),
    )


def planning_server(server_id: str) -> PlanningServer:
    """A pool server with a linear profile."""
    server = PlanServer(server_id, None, "h:1")
    return PlanningServer(server=server, host="h", profile=linear_profile())


def rotating_plan(
    manifest: Manifest,
    servers: Sequence[PlanningServer],
    shape: AttentionShape,
    options: PlanningOptions,
    *,
    epoch: int = 0,
) -> Plan:
    """Segment i goes to server i modulo their number, forward; to the next one, backward."""
    index = np.arange(manifest.n_segments)
    forward, backward = (
        TaskTable(
            manifest.segment_document,
            manifest.segment_offset,
            manifest.segment_offset + manifest.segment_length,
            (index + shift) % len(servers),
        )
        for shift in (0, 1)
    )
    by_server = np.ones((manifest.n_nano_batches, len(servers)))
    by_server[:, 0] = 2.0
    forecast = PhaseForecast(
        home_seconds=np.ones((manifest.n_nano_batches, manifest.n_ranks)),
        seconds=by_server,
        q_rows=by_server.astype(np.int64),
        kv_rows=by_server.astype(np.int64),
        bytes_in=by_server.astype(np.int64),
        bytes_out=by_server.astype(np.int64),
    )
    return Plan(
        manifest=manifest,
        epoch=epoch,
        servers=tuple(server.server for server in servers),
        forward=forward,
        backward=backward,
        mask=MaskKind.CAUSAL,
        planner="rotating",
        reason="segments take turns",
        forward_forecast=forecast,
        backward_forecast=forecast,
    )


def server_description(server_id: str, /, **changes: Any) -> membership_pb2.ServerDescription:
    """A valid description, but for ``changes``."""
    values: dict[str, Any] = {
        "server_id": server_id,
        "data_address": "127.0.0.1:9000",
        "host": "node-a",
        "device": "test device",
        "memory_bytes": 2**30,
        "profiles": [profile_to_proto(linear_profile())],
        "version": "0.1.0",
    }
    return membership_pb2.ServerDescription(**(values | changes))


def job_spec(name: str = "train", **changes: Any) -> jobs_pb2.JobSpec:
    """A valid spec of two ranks on the pool, but for ``changes``."""
    values: dict[str, Any] = {
        "name": name,
        "n_ranks": 2,
        "n_layers": 4,
        "n_nano_batches": 2,
        "shape": shape_to_proto(SHAPE),
        "placement": jobs_pb2.PLACEMENT_POOL,
        "tolerance": 0.05,
        "planner": "",
    }
    return jobs_pb2.JobSpec(**(values | changes))


def rank_manifest(
    step: int, rank: int, lengths: Sequence[Sequence[int]] | None = None
) -> RankManifest:
    """Three documents in two nano-batches, of lengths that depend on step and rank; or others."""
    return RankManifest.from_lengths(
        step, rank, lengths or [[5 + step, 7 + rank], [12 + step + rank]]
    )


class Watcher:
    """Reads a stream in a thread of its own; hands out its events with a deadline."""

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self._events: queue.Queue[Any] = queue.Queue()
        self._refused: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def next(self, kind: str | None = None) -> Any:
        """The next event's content; fails unless it is of ``kind``, if that is given."""
        event = self._events.get(timeout=DEADLINE_SECONDS)
        if isinstance(event, Exception):
            raise event
        assert event is not None, "the stream ended"
        found = event.WhichOneof("event")
        assert kind in (None, found), f"{found} came instead of {kind}: {event}"
        return getattr(event, found)

    def end(self) -> RpcError | None:
        """Waits for the end of the stream: its error, or None if it ended well."""
        event = self._events.get(timeout=DEADLINE_SECONDS)
        assert event is None or isinstance(event, RpcError), f"{event} came instead of the end"
        return event

    def is_quiet(self) -> bool:
        """Nothing has come, nor does it within a moment."""
        try:
            self._events.put(self._events.get(timeout=0.1))
        except queue.Empty:
            return True
        return False

    def cancel(self) -> None:
        self._stream.cancel()
        self._thread.join(DEADLINE_SECONDS)

    def _read(self) -> None:
        try:
            for event in self._stream:
                is_refusal = event.HasField("hand_in_refused")
                (self._refused if is_refusal else self._events).put(event)
        except RpcError as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: RpcError | None) -> None:
        self._events.put(error)
        self._refused.put(error)


class RankWatcher(Watcher):
    """A rank's stream, up and down."""

    def __init__(self, jobs: jobs_pb2_grpc.JobsStub, job_id: str, lease: str) -> None:
        self._own = partial(jobs_pb2.WatchRankRequest, job_id=job_id, rank_lease_id=lease)
        self._requests: queue.Queue[Any] = queue.Queue()
        self._requests.put(self._own())
        super().__init__(jobs.WatchRank(iter(self._requests.get, None)))

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def say(self, **request: Any) -> None:
        """Returns once the control plane has taken it in, as the refusal of what comes behind it
        shows; raises its own refusal."""
        behind = jobs_pb2.HandIn(manifest=plan_pb2.RankManifest(step=2**40))
        self._requests.put(self._own(**request))
        self._requests.put(self._own(hand_in=behind))
        error: RpcError | None = None
        while (event := self._refused.get(timeout=DEADLINE_SECONDS)) is not None:
            if isinstance(event, Exception):
                raise event
            refused = event.hand_in_refused
            if refused.step == behind.manifest.step:
                break
            error = RpcError(Reason.of(refused.kind), "WatchRank", "", refused.error)
        if error is not None:
            raise error

    def cancel(self) -> None:
        self._requests.put(None)
        super().cancel()


class Tokens(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc]
):
    """Sends with every call the token of the lease or, if that is unknown, of the job it names:
    one client of a test plays several ranks."""

    def __init__(self) -> None:
        self.of: dict[str, bytes] = {}

    def opened(self, answer: jobs_pb2.OpenJobResponse) -> None:
        """A rank has joined."""
        self.of[answer.rank_lease_id] = self.of[answer.job_id] = answer.token

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._with_token(details, request), request)

    intercept_unary_stream = intercept_unary_unary

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        first = next(requests)
        return continuation(self._with_token(details, first), chain([first], requests))

    def _with_token(self, details: Any, request: Any) -> Any:
        names = [getattr(request, name, "") for name in ("rank_lease_id", "lease_id", "job_id")]
        if isinstance(request, jobs_pb2.ReportStepRequest) and request.HasField("server"):
            names = names[:2]
        tokens = [self.of[name] for name in names if name in self.of]
        if not tokens or details.metadata:
            return details
        return details._replace(metadata=[(JOB_TOKEN_KEY, tokens[0])])


class Client:
    """One process that talks to the control plane."""

    def __init__(self, settings: RpcSettings) -> None:
        self.tokens = Tokens()
        self.channel = grpc.intercept_channel(open_channel(settings), self.tokens)
        self.jobs = jobs_pb2_grpc.JobsStub(self.channel)
        self._streams: dict[str, RankWatcher] = {}
        self.membership = membership_pb2_grpc.MembershipStub(self.channel)
        self.cluster = cluster_pb2_grpc.ClusterStub(self.channel)

    def register(self, server_id: str, **changes: Any) -> str:
        """Registers a pool server; its lease."""
        request = membership_pb2.RegisterServerRequest(
            server=server_description(server_id, **changes)
        )
        return str(self.membership.RegisterServer(request).lease_id)

    def open(
        self, rank: int, spec: jobs_pb2.JobSpec | None = None, *, stands_by: bool = False
    ) -> tuple[str, str]:
        """Opens a job as ``rank``, with an in-place server if it needs one, or with one that stands
        by: job id and lease."""
        spec = spec or job_spec()
        request = jobs_pb2.OpenJobRequest(spec=spec, rank=rank, host=f"host-{rank}")
        if stands_by or spec.placement != jobs_pb2.PLACEMENT_POOL:
            changes: dict[str, Any] = {"profiles": []} if stands_by else {}
            own = server_description(f"{spec.name}.rank-{rank}", **changes)
            request.in_place_server.CopyFrom(own)
        answer = self.jobs.OpenJob(request)
        self.tokens.opened(answer)
        return answer.job_id, answer.rank_lease_id

    def report_lost(
        self,
        job_id: str,
        lease: str,
        server_id: str,
        epoch: int,
        *,
        cause: int = jobs_pb2.LOSS_CAUSE_TRANSPORT_ERROR,
    ) -> None:
        request = jobs_pb2.ReportServerLostRequest(
            job_id=job_id,
            rank_lease_id=lease,
            server_id=server_id,
            epoch=epoch,
            detail="connection reset",
        )
        # As a newer release may, whose numbers are unknown here.
        request.cause = cast(jobs_pb2.LossCause, cause)
        self.jobs.ReportServerLost(request)

    def report_progress(
        self, job_id: str, lease: str, epoch: int, steps: Mapping[int, Sequence[int] | None]
    ) -> None:
        """Answers a recovery: complete ticks by step, None for a step that is done."""
        told = [
            jobs_pb2.StepProgress(
                step=step, complete_ticks=[8, 8] if ticks is None else ticks, done=ticks is None
            )
            for step, ticks in steps.items()
        ]
        progress = jobs_pb2.Progress(epoch=epoch, steps=told)
        self._stream(job_id, lease).say(progress=progress)

    def submit(
        self, job_id: str, lease: str, manifest: RankManifest, *, forward_only: bool = False
    ) -> None:
        message = rank_manifest_to_proto(manifest)
        self.hand_in(job_id, lease, jobs_pb2.HandIn(manifest=message, forward_only=forward_only))

    def hand_in(self, job_id: str, lease: str, message: jobs_pb2.HandIn) -> None:
        self._stream(job_id, lease).say(hand_in=message)

    def watch_rank(self, job_id: str, lease: str) -> Watcher:
        """A new stream, which replaces that on which the rank has handed in before."""
        stream = self._streams[lease] = RankWatcher(self.jobs, job_id, lease)
        return stream

    def _stream(self, job_id: str, lease: str) -> RankWatcher:
        if lease not in self._streams or self._streams[lease].has_ended:
            self.watch_rank(job_id, lease)
        return self._streams[lease]

    def watch_server(self, lease: str) -> Watcher:
        return Watcher(self.jobs.WatchServer(jobs_pb2.WatchServerRequest(lease_id=lease)))

    def close_job(self, job_id: str, lease: str, error: str = "") -> None:
        self.jobs.CloseJob(
            jobs_pb2.CloseJobRequest(job_id=job_id, rank_lease_id=lease, error=error)
        )

    def heartbeat(self, lease: str) -> membership_pb2.HeartbeatResponse:
        answer: membership_pb2.HeartbeatResponse = self.membership.Heartbeat(
            membership_pb2.HeartbeatRequest(lease_id=lease)
        )
        return answer

    def report_rank_lost(self, lease: str, job_id: str, rank: int) -> None:
        self.membership.ReportRankLost(
            membership_pb2.ReportRankLostRequest(lease_id=lease, job_id=job_id, rank=rank)
        )

    @staticmethod
    def watching(control_plane: ControlPlane, kind: str) -> float:
        """How many streams to a ``"rank"`` or ``"server"`` are open, by the metric."""
        name = "distca_control_plane_subscribers"
        value = control_plane.metrics.registry.get_sample_value(name, {"kind": kind})
        assert value is not None
        return value

    def report_rank(
        self, job_id: str, lease: str, step: int, rank: int, *, waited: float | None = 0.25
    ) -> None:
        self.jobs.ReportStep(
            jobs_pb2.ReportStepRequest(
                job_id=job_id,
                step=step,
                lease_id=lease,
                rank=jobs_pb2.RankMeasurement(
                    rank=rank, step_seconds=2.0 + rank, wait_seconds=waited, tokens=100
                ),
            )
        )

    def report_server(
        self, job_id: str, lease: str, step: int, server_id: str, seconds: float = 1.0
    ) -> None:
        self.jobs.ReportStep(
            jobs_pb2.ReportStepRequest(
                job_id=job_id,
                step=step,
                lease_id=lease,
                server=jobs_pb2.ServerMeasurement(
                    server_id=server_id,
                    forward_busy_seconds=[seconds, seconds],
                    backward_busy_seconds=[2 * seconds, 2 * seconds],
                    backward_layers=[1, 1],
                ),
            )
        )


class _Leaping(asyncio.SelectorEventLoop):
    """An event loop whose clock goes as fast as any, and can be set forward."""

    ahead_seconds = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_seconds


class TimedControlPlane(ControlPlane):
    """A control plane for which time passes when a test says so, besides by itself."""

    def pass_time(self, seconds: float) -> None:
        """Sets its clock forward; all that was due has begun when this returns."""
        loop = self._clock.__self__  # type: ignore[attr-defined]
        asyncio.run_coroutine_threadsafe(_leap(loop, seconds), loop).result(DEADLINE_SECONDS)


async def _leap(loop: _Leaping, seconds: float) -> None:
    loop.ahead_seconds += seconds
    # Timers that are due, then the tasks that slept on them, then what those have called.
    for _ in range(4):
        await asyncio.sleep(0)


@contextmanager
def running(
    planners: Mapping[str, Planner] | None = None,
    *,
    coordinator: Mapping[str, Any] | None = None,
    listen_address: str = "127.0.0.1:0",
    metrics_address: str | None = None,
    start_seconds: float = DEADLINE_SECONDS,
    stands_by: bool = False,
    **settings: Any,
) -> Iterator[TimedControlPlane]:
    """A control plane that serves until the block ends, on free ports unless told otherwise; if it
    ``stands_by``, until another one ends."""
    limits: dict[str, Any] = {"default_planner": "rotating", "lease_seconds": 30.0}
    chosen = ControlPlaneSettings(
        listen_address=listen_address,
        metrics_address=metrics_address,
        coordinator=CoordinatorSettings(**limits | dict(coordinator or {})),
        stop_seconds=0.5,
        **settings,
    )
    loop = _Leaping()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def on_loop(make: Callable[[], Any], seconds: float = DEADLINE_SECONDS) -> Any:
        return asyncio.run_coroutine_threadsafe(make(), loop).result(seconds)

    async def build() -> TimedControlPlane:
        control_plane = TimedControlPlane(chosen, planners or {"rotating": rotating_plan})
        await control_plane.start()
        if not stands_by:
            await control_plane.take_over()
        return control_plane

    control_plane = on_loop(build, start_seconds)
    leading = asyncio.run_coroutine_threadsafe(control_plane.lead(), loop) if stands_by else None
    try:
        yield control_plane
    finally:
        if leading is not None:
            leading.cancel()
        on_loop(control_plane.stop)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE_SECONDS)
        loop.close()


@contextmanager
def client_of(address: str, **settings: Any) -> Iterator[Client]:
    """A client of the control plane at ``address``."""
    client = Client(RpcSettings(address=address, **settings))
    try:
        yield client
    finally:
        client.channel.close()
