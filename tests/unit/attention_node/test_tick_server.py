"""The tick server's bookkeeping: plans that come twice or late, steps that fail or are given up,
and buffers, which all go back to the pool."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from attention_node.executor import Executor
from attention_node.hello import PROTOCOL_VERSION
from attention_node.metrics import NodeMetrics
from attention_node.open_tick import TickGivenUp
from attention_node.served_job import JobDescription, StepBusy
from attention_node.tick_server import Host, TickServer
from core_attention.ca_task import Phase, TaskTable
from core_attention.kernels.cpu import CpuKernel
from core_attention.kernels.protocol import ForwardPart
from core_attention.manifest import RankManifest, Segment
from core_attention.plan import Plan
from core_attention.score_rule import PLAIN, ScoreRule
from core_attention.tick import Tick
from data_plane.buffer_pool import BufferPool, PooledBuffer
from data_plane.device_memory import DriverError
from data_plane.transport import (
    Transfer,
)
from distca.contract.tokens import KEY_BYTES, rank_token
from distca.v1 import data_plane_pb2
from tests.support.loopback import LoopbackClaim, LoopbackConnection
from tests.support.waiting import eventually
from tests.unit.attention_node.cases import SCALE, SHAPE, make_plan

N_LAYERS = 3
JOB = JobDescription(
    job_id="job",
    verification_key=bytes(KEY_BYTES),
    n_ranks=2,
    n_layers=N_LAYERS,
    n_nano_batches=1,
    shape=SHAPE,
    scale=SCALE,
    name="job",
)
TICK_BYTES = 4608
"""Of all buffers of one tick of the plan below: requests and replies, as a pool rounds them."""


class Line(LoopbackConnection):
    """The server's end of a rank's connection: the test decides what arrives, and sees what was
    put."""

    def __init__(self) -> None:
        super().__init__("rank")
        self.other = LoopbackConnection("server-0")
        self.other.other = self
        self.puts: list[int] = []
        self.reason = ""

    def put(
        self,
        tag: int,
        buffer: PooledBuffer,
        deadline_seconds: float,
        ready: Callable[[], bool] | None = None,
    ) -> Transfer:
        self.puts.append(tag)
        return super().put(tag, buffer, deadline_seconds, ready)

    def close(self, reason: str = "", *, finished: bool = False) -> None:
        self.reason = self.reason or reason
        super().close(reason, finished=finished)

    def rows_arrive(self, tick: Tick) -> None:
        """The request of ``tick``, whose rows may hold anything, when its receive is posted."""
        tag = tick.tag(reply=False)
        eventually(lambda: tag in self.offers)
        self.offers.pop(tag).end()


class FailingKernel(CpuKernel):
    def forward(self, parts: Sequence[ForwardPart], scale: float, rule: ScoreRule = PLAIN) -> None:
        raise MemoryError("no memory for the scores")


class Harness(Host):
    """A server, its pool and its ranks."""

    def __init__(self, kernel: CpuKernel, limit_bytes: int | None = None) -> None:
        self.finished: list[StepBusy] = []
        self.registry = CollectorRegistry()
        self.pool = BufferPool(limit_bytes=limit_bytes)
        self.executor = Executor(kernel, torch.device("cpu"))
        metrics = NodeMetrics(self.registry, "server-0")
        self.server = TickServer("server-0", self.executor, self.pool, self, metrics)
        self.server.open_job(JOB)

    def step_finished(self, busy: StepBusy) -> None:
        self.finished.append(busy)

    def connect(self, rank: int, first_step: int = 0, epoch: int = 0) -> Line:
        connection = Line()
        hello = data_plane_pb2.Hello(
            version=PROTOCOL_VERSION,
            job_id=JOB.job_id,
            rank=rank,
            server_id="server-0",
            first_step=first_step,
            epoch=epoch,
        )
        claim = LoopbackClaim(hello.SerializeToString(), rank_token(JOB.verification_key, rank))
        self.server.accept(claim, connection)
        return connection

    def add(self, step: int, epoch: int = 0) -> None:
        plan = replace(plan_of(step), epoch=epoch)
        self.server.add_plan(JOB.job_id, plan, forward_only=True)


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness(CpuKernel())
    yield made
    made.server.close()
    made.executor.close()


def plan_of(step: int, *, elsewhere: bool = False) -> Plan:
    """One document over both ranks: rank 1's task needs the keys of rank 0.

    Args:
        step: its number.
        elsewhere: rank 0's own task is another server's.
    """
    manifests = [RankManifest(step, rank, ((Segment(1, 8, 4 * rank, 4),),)) for rank in range(2)]
    tasks = TaskTable(*np.array([[0, 0], [0, 4], [4, 8], [int(elsewhere), 0]]))
    return make_plan(manifests, tasks, n_servers=2)


def ticks_of(step: int) -> list[Tick]:
    return [Tick(step, layer, 0, Phase.FORWARD) for layer in range(N_LAYERS)]


def run_step(harness: Harness, step: int, *connections: Line) -> None:
    for tick, connection in itertools.product(ticks_of(step), connections):
        connection.rows_arrive(tick)
    eventually(lambda: len(connections[0].puts) >= N_LAYERS)


def test_a_finished_step_whose_plan_comes_again_is_not_expected_again(harness: Harness) -> None:
    ranks = [harness.connect(rank) for rank in range(2)]
    for _ in range(2):
        harness.add(0)
    run_step(harness, 0, *ranks)
    eventually(lambda: len(harness.finished) == 1)
    harness.add(0)
    assert harness.server.idle
    assert not ranks[0].offers
    harness.add(1)
    assert sorted(ranks[0].offers) == [tick.tag(reply=False) for tick in ticks_of(1)[:1]]


def test_a_request_is_given_back_with_its_reply(harness: Harness) -> None:
    """Its rank needs the memory for the next one, while the tick waits for another rank."""
    first, _ = (harness.connect(rank) for rank in range(2))
    harness.add(0)
    posted = harness.pool.stats().in_use_bytes
    first.rows_arrive(ticks_of(0)[0])
    eventually(lambda: list(first.offers) == [ticks_of(0)[1].tag(reply=False)])
    assert harness.server.open_ticks == 1
    assert harness.pool.stats().in_use_bytes == posted


def test_a_rank_that_is_owed_no_reply_may_be_a_tick_ahead(harness: Harness) -> None:
    keys_only, other = (harness.connect(rank) for rank in range(2))
    harness.server.add_plan(JOB.job_id, plan_of(0, elsewhere=True), forward_only=True)
    made = harness.pool.stats().allocations
    tags = [tick.tag(reply=False) for tick in ticks_of(0)]
    assert list(keys_only.offers) == tags[:2]
    for tick in ticks_of(0)[:2]:
        keys_only.rows_arrive(tick)
    assert not keys_only.offers
    other.rows_arrive(ticks_of(0)[0])
    eventually(lambda: list(keys_only.offers) == tags[2:])
    assert not keys_only.puts
    assert harness.pool.stats().allocations == made


def test_memory_of_a_failed_tick_is_given_back_when_the_device_is_done() -> None:
    """Parts that were launched before the one that failed still write to replies."""
    held: list[int] = []
    made: list[Harness] = []

    class LaunchingKernel(FailingKernel):
        def synchronize(self) -> None:
            held.append(made[0].pool.stats().in_use_bytes)

    made.append(Harness(LaunchingKernel()))
    connection = made[0].connect(0)
    made[0].add(0)
    posted = made[0].pool.stats().in_use_bytes
    connection.rows_arrive(ticks_of(0)[0])
    eventually(lambda: connection.closed)
    # The request that was posted, and its reply.
    assert held
    assert held[0] > posted
    made[0].executor.close()


def test_a_device_that_gives_no_memory_costs_one_rank_its_connection(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (harness.connect(rank) for rank in range(2))
    harness.add(0)
    acquire = harness.pool.acquire

    def refuse_after_reply(nbytes: int) -> PooledBuffer:
        if first.puts and not first.closed:
            raise DriverError("cuMemAlloc_v2", "unspecified launch failure", 719)
        return acquire(nbytes)

    monkeypatch.setattr(harness.pool, "acquire", refuse_after_reply)
    first.rows_arrive(ticks_of(0)[0])
    eventually(lambda: first.closed)
    assert "launch failure" in first.reason
    second.rows_arrive(ticks_of(0)[0])
    eventually(lambda: len(second.puts) == 1)


def test_a_step_that_one_rank_gives_up_holds_no_buffers(harness: Harness) -> None:
    first, second = harness.connect(0), harness.connect(1)
    harness.add(0)
    second.rows_arrive(ticks_of(0)[0])
    first.close("gave up")
    again = harness.connect(0, first_step=1)
    eventually(lambda: second.closed)
    assert "rank 0 did not run the step to its end" in second.reason
    harness.add(1)
    second = harness.connect(1, first_step=1)
    run_step(harness, 1, again, second)
    eventually(lambda: [busy.step for busy in harness.finished] == [1])
    eventually(lambda: harness.pool.stats().in_use_bytes == 0)


def test_a_pool_with_room_for_one_tick_serves_all_of_them_one_after_the_other() -> None:
    """Rank 0's second tick is not received before rank 1's first one is over."""
    harness = Harness(CpuKernel(), limit_bytes=TICK_BYTES)
    ranks = [harness.connect(rank) for rank in range(2)]
    harness.add(0)
    first = ticks_of(0)[0]
    for connection in ranks:
        assert list(connection.offers) == [first.tag(reply=False)]
    ranks[0].rows_arrive(first)
    time.sleep(0.1)
    assert not ranks[0].offers
    ranks[1].rows_arrive(first)
    for tick in ticks_of(0)[1:]:
        for connection in ranks:
            eventually(lambda c=connection, t=tick: t.tag(reply=False) in c.offers)  # type: ignore[misc]
            connection.rows_arrive(tick)
    eventually(lambda: len(harness.finished) == 1)
    waited = "distca_attention_node_memory_wait_seconds_total"
    assert (harness.registry.get_sample_value(waited, {"server": "server-0"}) or 0.0) > 0.05
    eventually(lambda: harness.pool.stats().in_use_bytes == 0)
    harness.executor.close()


def test_a_closed_job_gives_up_its_ticks_and_takes_no_more(harness: Harness) -> None:
    first, second = harness.connect(0), harness.connect(1)
    harness.add(0)
    under_way = first.offers.pop(ticks_of(0)[0].tag(reply=False))
    second.rows_arrive(ticks_of(0)[0])
    harness.server.close_job(JOB.job_id, "rank 1 failed")
    under_way.end()
    assert "rank 1 failed" in first.reason
    eventually(lambda: harness.pool.stats().in_use_bytes == 0)


def test_the_local_rank_is_told_that_its_step_was_given_up() -> None:
    executor = Executor(CpuKernel(), torch.device("cpu"))
    server = TickServer("server-0", executor, BufferPool(), Host(), local_rank=0)
    server.open_job(JOB)
    with pytest.raises(TickGivenUp):
        server.submit_local(JOB.job_id, 0, ticks_of(0)[0], {}, {})
    executor.close()


def test_memory_of_a_step_is_there_with_its_plan(harness: Harness) -> None:
    harness.add(0)
    made = harness.pool.stats().allocations
    # Of each rank a request and a reply; free memory lies in pieces, so there is a little more.
    assert TICK_BYTES <= harness.pool.stats().idle_bytes <= 1.13 * TICK_BYTES
    assert made == 1
    connections = [harness.connect(rank) for rank in range(2)]
    for number, tick in enumerate(ticks_of(0), 1):
        for connection in connections:
            connection.rows_arrive(tick)
        eventually(lambda number=number: all(len(c.puts) == number for c in connections))  # type: ignore[misc]
        # A tick is over a moment after its last reply.
        eventually(lambda: harness.server.open_ticks == 0)
    assert harness.pool.stats().allocations == made


def test_a_rank_that_sends_a_tick_on_two_connections_counts_once(harness: Harness) -> None:
    first, other, second = (harness.connect(rank) for rank in (0, 1, 0))
    harness.add(0)
    tick = ticks_of(0)[0]
    first.rows_arrive(tick)
    second.rows_arrive(tick)
    eventually(lambda: second.closed)
    other.rows_arrive(tick)
    eventually(lambda: bool(first.puts) and bool(other.puts))
    assert not first.closed
    harness.server.close()
    eventually(lambda: harness.pool.stats().in_use_bytes == 0)
