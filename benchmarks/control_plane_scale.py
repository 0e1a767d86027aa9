"""How long a large job waits for its plans: manifests in to plans delivered, over real gRPC.

A control plane process serves 512 trainer clients and 512 attention servers, all simulated by this
process: every one has its own watch stream, and every trainer submits its own manifest, as
documents drawn from a known distribution. Steps run one after another. Reported are, over steps
and members, the seconds

* from the first manifest's submission to a member's plan (what a job sees),
* from the last manifest's submission to a member's plan, whatever waits before that manifest,

and the planning itself, as the control plane measures it. Both processes share this machine's
cores, so encoding 512 manifests and decoding 1024 plans count, as they would not with 1024 hosts.

    python benchmarks/control_plane_scale.py --steps 30 --out control_plane_scale.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from control_plane.server import run
from control_plane.settings import ControlPlaneSettings, CoordinatorSettings
from core_attention.cost_model import CostProfile
from core_attention.manifest import RankManifest
from distca.apps.simulator.lengths import sample_lengths
from distca.apps.simulator.packing import pack_in_order, rank_manifests
from distca.contract.codec import profile_to_proto, rank_manifest_to_proto, shape_to_proto
from distca.contract.rpc import DEFAULT_MAX_MESSAGE_BYTES
from distca.contract.tokens import JOB_TOKEN_KEY
from distca.v1 import jobs_pb2, jobs_pb2_grpc, membership_pb2, membership_pb2_grpc

STARTUP_DEADLINE_SECONDS = 60.0
CALL_DEADLINE_SECONDS = 60.0
LEASE_SECONDS = 600.0
"""Longer than the benchmark: heartbeats are not what is measured."""

WARM_UP_STEPS = 3
"""Left out: the first plans compile or load compiled code, and connections open."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is simulated."""

    n_ranks: int
    n_servers: int
    tokens_per_rank: int
    n_nano_batches: int
    distribution: str
    placement: str
    planner: str
    steps: int
    channels: int


@dataclass
class StepTimes:
    """When things happened in one step, by ``time.perf_counter``."""

    first_submitted: float = 0.0
    last_submitted: float = 0.0
    delivered: list[float] = field(default_factory=list)
    plan_bytes: int = 0


class Inbox:
    """Counts the plans of a step as members receive them."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self.step = -1
        self._expected = 0
        self._complete = asyncio.Event()

    def expect(self, step: int, n_members: int) -> None:
        """The next plans are those of ``step``; it is complete with ``n_members`` of them."""
        self.times, self.step, self._expected = StepTimes(), step, n_members
        self._complete.clear()

    def receive(self, event: jobs_pb2.PlanEvent) -> None:
        """Notes a plan; anything but a plan or the job's opening is an error."""
        now = time.perf_counter()
        match event.WhichOneof("event"):
            case "step_planned":
                if event.step_planned.plan.manifest.step != self.step:
                    raise RuntimeError(f"a plan of another step than {self.step} arrived")
                self.times.delivered.append(now)
                self.times.plan_bytes += event.ByteSize()
                if len(self.times.delivered) >= self._expected:
                    self._complete.set()
            case "job_opened" | "job_closed":
                pass
            case _:
                raise RuntimeError(f"unexpected event: {event}")

    async def complete(self) -> StepTimes:
        """Waits until every member has its plan."""
        try:
            async with asyncio.timeout(CALL_DEADLINE_SECONDS):
                await self._complete.wait()
        except TimeoutError as error:
            raise RuntimeError(
                f"step {self.step}: {len(self.times.delivered)} of {self._expected} members have "
                f"their plan after {CALL_DEADLINE_SECONDS:g} s"
            ) from error
        return self.times


@contextmanager
def control_plane_process(planner: str) -> Iterator[str]:
    """A control plane of its own process; gives its address."""
    with tempfile.TemporaryDirectory() as folder:
        address_file = Path(folder) / "address.json"
        process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(address_file, planner), daemon=True
        )
        process.start()
        try:
            deadline = time.monotonic() + STARTUP_DEADLINE_SECONDS
            while not address_file.exists():
                if time.monotonic() > deadline or not process.is_alive():
                    raise RuntimeError("the control plane did not start; see its output above")
                time.sleep(0.05)
            yield json.loads(address_file.read_text())["grpc"]
        finally:
            process.terminate()
            process.join(STARTUP_DEADLINE_SECONDS)


def _serve(address_file: Path, planner: str) -> None:
    coordinator = CoordinatorSettings(lease_seconds=LEASE_SECONDS, planning_threads=1)
    if planner:
        coordinator = CoordinatorSettings(
            lease_seconds=LEASE_SECONDS, planning_threads=1, default_planner=planner
        )
    run(
        ControlPlaneSettings(
            listen_address="127.0.0.1:0",
            metrics_address=None,
            coordinator=coordinator,
            address_file=address_file,
        )
    )


@asynccontextmanager
async def open_channels(address: str, count: int) -> AsyncIterator[list[grpc.aio.Channel]]:
    """``count`` connections, many streams on each."""
    options = [
        ("grpc.max_receive_message_length", DEFAULT_MAX_MESSAGE_BYTES),
        ("grpc.use_local_subchannel_pool", 1),  # else all channels share one connection
    ]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(count)]
    try:
        yield channels
    finally:
        for channel in channels:
            await channel.close()


def shipped_profile() -> CostProfile:
    """The H200 profile that ships with the simulator."""
    with as_file(files("distca.apps.simulator") / "profiles" / "h200-llama3-8b.json") as path:
        return CostProfile.load(path)


def description(server_id: str, host: str, profile: Any) -> membership_pb2.ServerDescription:
    """A server as it registers."""
    return membership_pb2.ServerDescription(
        server_id=server_id,
        data_address=f"{host}:1",
        host=host,
        device=profile.device,
        memory_bytes=1 << 37,
        profiles=[profile],
        version="benchmark",
    )


class SimulatedJob:
    """All trainers and servers of one job."""

    def __init__(self, load: Load, channels: Sequence[grpc.aio.Channel], inbox: Inbox) -> None:
        self._load = load
        self._inbox = inbox
        self._jobs = [jobs_pb2_grpc.JobsStub(channel) for channel in channels]
        self._membership = [membership_pb2_grpc.MembershipStub(channel) for channel in channels]
        self._watchers: list[asyncio.Task[None]] = []
        self._ranks: list[tuple[str, Any]] = []
        self._job_id = ""

    async def start(self) -> None:
        """Registers servers, opens the job on every rank and starts all watches."""
        profile = shipped_profile()
        message = profile_to_proto(profile)
        for i in range(self._load.n_servers if self._load.placement != "IN_PLACE" else 0):
            stub = self._membership[i % len(self._membership)]
            registered = await stub.RegisterServer(
                membership_pb2.RegisterServerRequest(
                    server=description(f"server-{i}", f"pool-{i}", message)
                ),
                timeout=CALL_DEADLINE_SECONDS,
            )
            self._watch(
                self._jobs[i % len(self._jobs)].WatchServer(
                    jobs_pb2.WatchServerRequest(lease_id=registered.lease_id)
                )
            )
        for rank in range(self._load.n_ranks):
            await self._open(rank, profile, message)

    async def _open(self, rank: int, profile: CostProfile, message: Any) -> None:
        load, stub = self._load, self._jobs[rank % len(self._jobs)]
        in_place = None
        if load.placement != "POOL":
            in_place = description(f"scale.rank-{rank}", f"host-{rank}", message)
        opened = await stub.OpenJob(
            jobs_pb2.OpenJobRequest(
                spec=jobs_pb2.JobSpec(
                    name="scale",
                    n_ranks=load.n_ranks,
                    n_layers=32,
                    n_nano_batches=load.n_nano_batches,
                    shape=shape_to_proto(profile.shape),
                    placement=f"PLACEMENT_{load.placement}",
                    tolerance=0.03,
                ),
                rank=rank,
                in_place_server=in_place,
                host=f"host-{rank}",
            ),
            timeout=CALL_DEADLINE_SECONDS,
        )
        self._job_id = opened.job_id
        stream = stub.WatchRank(metadata=((JOB_TOKEN_KEY, opened.token),))
        await stream.write(
            jobs_pb2.WatchRankRequest(job_id=opened.job_id, rank_lease_id=opened.rank_lease_id)
        )
        self._ranks.append((opened.rank_lease_id, stream))
        self._watch(stream)

    def _watch(self, stream: Any) -> None:
        async def read() -> None:
            async for event in stream:
                self._inbox.receive(event)

        self._watchers.append(asyncio.create_task(read()))

    async def run_step(self, step: int, manifests: Sequence[RankManifest]) -> StepTimes:
        """Submits all manifests at once and waits for all plans."""
        requests = [
            jobs_pb2.WatchRankRequest(
                job_id=self._job_id,
                rank_lease_id=lease,
                hand_in=jobs_pb2.HandIn(manifest=rank_manifest_to_proto(manifest)),
            )
            for (lease, _), manifest in zip(self._ranks, manifests, strict=True)
        ]
        self._inbox.expect(step, len(self._watchers))
        times = self._inbox.times
        times.first_submitted = time.perf_counter()

        async def submit(stream: Any, request: jobs_pb2.WatchRankRequest) -> None:
            times.last_submitted = time.perf_counter()
            await stream.write(request)

        async with asyncio.timeout(CALL_DEADLINE_SECONDS):
            await asyncio.gather(
                *(
                    submit(each, request)
                    for (_, each), request in zip(self._ranks, requests, strict=True)
                )
            )
        return await self._inbox.complete()

    async def plan_seconds(self, step: int) -> float:
        """What the control plane measured for the planning of ``step``."""
        response = await self._jobs[0].GetStep(
            jobs_pb2.GetStepRequest(job_id=self._job_id, step=step), timeout=CALL_DEADLINE_SECONDS
        )
        return float(response.plan_seconds)

    async def stop(self) -> None:
        """Ends all watches; a watch that failed raises here."""
        for task in self._watchers:
            if task.done():
                await task
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)


async def measure(load: Load, address: str) -> dict[str, Any]:
    """Runs all steps and sums them up."""
    load_before = os.getloadavg()[0]  # what else this machine is doing
    inbox = Inbox()
    measured: list[StepTimes] = []
    planning: list[float] = []
    async with open_channels(address, load.channels) as channels:
        job = SimulatedJob(load, channels, inbox)
        await job.start()
        for step in range(WARM_UP_STEPS + load.steps):
            tokens = load.n_ranks * load.tokens_per_rank
            lengths = sample_lengths(load.distribution, tokens, load.tokens_per_rank, step)
            manifest = pack_in_order(
                lengths, load.n_ranks, load.tokens_per_rank, load.n_nano_batches, step
            )
            times = await job.run_step(step, rank_manifests(manifest))
            if step >= WARM_UP_STEPS:
                measured.append(times)
                planning.append(await job.plan_seconds(step))
        await job.stop()
    return summary(load, measured, planning, load_before)


def summary(
    load: Load, measured: Sequence[StepTimes], planning: Sequence[float], load_before: float
) -> dict[str, Any]:
    """Percentiles over steps and members, in milliseconds."""
    since_first = np.array([np.array(t.delivered) - t.first_submitted for t in measured])
    since_last = np.array([np.array(t.delivered) - t.last_submitted for t in measured])
    submit = np.array([t.last_submitted - t.first_submitted for t in measured])
    planned = np.array(planning)
    return {
        "load": vars(load),
        "cores": os.cpu_count(),
        "load_average_before": round(load_before, 1),
        "members": int(since_first.shape[1]),
        "plan_megabytes": float(np.mean([t.plan_bytes for t in measured])) / 1e6,
        "submitting_ms": percentiles(submit),
        "first_manifest_to_plan_ms": percentiles(since_first),
        "first_manifest_to_last_plan_ms": percentiles(since_first.max(axis=1)),
        "last_manifest_to_plan_ms": percentiles(since_last),
        "last_manifest_to_last_plan_ms": percentiles(since_last.max(axis=1)),
        "planning_ms": percentiles(planned),
        "planning_share": float(planned.mean() / since_first.max(axis=1).mean()),
    }


def percentiles(seconds: np.ndarray) -> dict[str, float]:
    """p50, p99 and the largest, in milliseconds."""
    milliseconds = seconds.ravel() * 1e3
    return {
        "p50": round(float(np.percentile(milliseconds, 50)), 2),
        "p99": round(float(np.percentile(milliseconds, 99)), 2),
        "max": round(float(milliseconds.max()), 2),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--servers", type=int, default=512)
    parser.add_argument("--tokens-per-rank", type=int, default=131072)
    parser.add_argument("--nano-batches", type=int, default=2)
    parser.add_argument("--distribution", default="pretrain", choices=("pretrain", "prolong"))
    parser.add_argument("--placement", default="POOL", choices=("POOL", "IN_PLACE"))
    parser.add_argument("--planner", default="")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--out", type=Path, help="write the summary here as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    load = Load(
        n_ranks=arguments.ranks,
        n_servers=arguments.servers,
        tokens_per_rank=arguments.tokens_per_rank,
        n_nano_batches=arguments.nano_batches,
        distribution=arguments.distribution,
        placement=arguments.placement,
        planner=arguments.planner,
        steps=arguments.steps,
        channels=arguments.channels,
    )
    with control_plane_process(load.planner) as address:
        result = asyncio.run(measure(load, address))
    text = json.dumps(result, indent=1)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    from rich.console import Console

    Console().print_json(text)


if __name__ == "__main__":
    main()
