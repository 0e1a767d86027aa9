"""A server's receive path: hellos, plans, and messages of ticks with any tag, size and content."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from attention_node.executor import Executor
from attention_node.hello import PROTOCOL_VERSION
from attention_node.served_job import JobDescription
from attention_node.tick_server import Host, TickServer
from core_attention.ca_task import Phase, TaskTable
from core_attention.kernels.cpu import CpuKernel
from core_attention.manifest import Manifest, RankManifest, Segment
from core_attention.message import reply_layout, request_layout
from core_attention.message_views import message_views
from core_attention.routing import derive_routes
from core_attention.tick import Tick, ticks_of_lane
from data_plane.buffer_pool import BufferPool
from data_plane.transport import HandshakeRejected
from distca.contract.codec import WireError, first_tick_from_bytes, plan_from_proto, plan_to_proto
from distca.contract.tokens import rank_token
from distca.v1 import data_plane_pb2, jobs_pb2
from tests.service.fuzz.codec import N_NANO_BATCHES, N_RANKS, random_plan
from tests.service.fuzz.mutation import mutated_raw, parsed
from tests.support.loopback import LoopbackConnection, LoopbackTransport
from tests.support.plan_slices import for_server
from tests.support.team import assert_close
from tests.support.waiting import eventually
from tests.unit.attention_node.cases import (
    SCALE,
    SHAPE,
    Rank,
    home_rows,
    make_documents,
    make_plan,
)

N_LAYERS = 2
KEY = bytes(range(32))
SERVER = "server-0"
MAX_CONNECTIONS = 6
MAX_EPOCH = 2**40
SETTLE_SECONDS = 20.0
"""How long the executor may take to get through what a batch has left it."""


def _job(job_id: str, n_ranks: int, n_nano_batches: int) -> JobDescription:
    return JobDescription(
        job_id=job_id,
        verification_key=KEY,
        n_ranks=n_ranks,
        n_layers=N_LAYERS,
        n_nano_batches=n_nano_batches,
        shape=SHAPE,
        scale=SCALE,
        name=job_id,
    )


class Served:
    """A tick server on a loopback transport, a job that is attacked, and one that is not."""

    def __init__(self) -> None:
        self.pool = BufferPool(limit_bytes=64 * 2**20)
        self.executor = Executor(CpuKernel(), torch.device("cpu"))
        self.server = TickServer(SERVER, self.executor, self.pool, Host())
        self.transport = LoopbackTransport()
        self.address = self.transport.listen("server", 1, self.server.accept)
        self.open_attacked_job()
        self.connections: list[LoopbackConnection] = []
        self.epoch = 0
        self.step = 0

    def open_attacked_job(self) -> None:
        self.server.open_job(_job("attacked", N_RANKS, N_NANO_BATCHES))

    def hello(
        self, job: str, rank: int, *, epoch: int, first_step: int = 0
    ) -> data_plane_pb2.Hello:
        return data_plane_pb2.Hello(
            version=PROTOCOL_VERSION,
            job_id=job,
            rank=rank,
            server_id=SERVER,
            first_step=first_step,
            epoch=epoch,
        )

    def connect(self, hello: bytes, rank: int) -> LoopbackConnection:
        """Connects as somebody who has the token of ``rank``, whatever the hello says."""
        connection, welcome = self.transport.connect(
            self.address, hello, 1.0, secret=rank_token(KEY, rank)
        )
        assert data_plane_pb2.Welcome.FromString(welcome).server_id == SERVER
        return connection

    def settle(self) -> None:
        """Ends all jobs; everything borrowed comes back."""
        self.server.close()
        for connection in self.connections:
            connection.close()
        eventually(lambda: self.pool.stats().in_use_bytes == 0, SETTLE_SECONDS)

    def check_still_serves(self) -> None:
        """A job of honest ranks gets the results of the reference, forward and backward."""
        epoch = self.epoch + 1
        segments = [(Segment(1, 9, 0, 4), Segment(2, 3, 0, 3)), (Segment(1, 9, 4, 5),)]
        manifests = [RankManifest(0, rank, (segments[rank],)) for rank in range(2)]
        tasks = TaskTable(*np.array([(0, 0, 4, 0), (0, 4, 9, 0), (1, 0, 3, 0)]).T)
        plan = make_plan(manifests, tasks)
        self.server.open_job(_job("honest", 2, 1))
        self.server.add_plan("honest", plan, forward_only=False)
        ranks, reference = make_documents(plan.manifest)
        lines = [
            self.connect(self.hello("honest", rank, epoch=0).SerializeToString(), rank)
            for rank in range(2)
        ]
        self.connections += lines
        expected = {name: getattr(reference, name) for name in ("o", "lse", "dq", "dk", "dv")}
        for tick in ticks_of_lane(0, 0, N_LAYERS, backward=True):
            self._run_honest_tick(tick, plan.manifest, tasks, lines, ranks, expected)
        self.epoch = epoch

    def _run_honest_tick(
        self,
        tick: Tick,
        manifest: Manifest,
        tasks: TaskTable,
        lines: list[LoopbackConnection],
        ranks: list[Rank],
        expected: dict[str, torch.Tensor],
    ) -> None:
        routes = derive_routes(manifest, tasks, 0)
        awaited = []
        for (rank, _), route in routes.items():
            request_shape = request_layout(route, SHAPE, tick.phase)
            reply_shape = reply_layout(route, SHAPE, tick.phase)
            reply = self.pool.acquire(reply_shape.nbytes)
            transfer = lines[rank].offer(tick.tag(reply=True), reply, 10.0)
            request = self.pool.acquire(request_shape.nbytes)
            for name, view in message_views(request.tensor, request_shape).items():
                rows = route.kv_rows if name in ("k", "v") else route.q_rows
                view.copy_(ranks[rank].inputs[name][torch.from_numpy(rows)])
            lines[rank].put(tick.tag(reply=False), request, 10.0)
            request.release()
            awaited.append((rank, route, reply, reply_shape, transfer))
        for rank, route, reply, reply_shape, transfer in awaited:
            transfer.wait(SETTLE_SECONDS)
            home = home_rows(manifest, rank)
            for name, view in message_views(reply.tensor, reply_shape).items():
                rows = route.kv_rows if name in ("dk", "dv") else route.q_rows
                assert_close(name, view, expected[name][home[torch.from_numpy(rows)]])
            reply.release()


class TickTarget:
    """Everything that a server reads from ranks, and the plans that it reads it by."""

    name = "ticks"
    share = 0.2
    batch = 500

    @contextmanager
    def fresh(self) -> Iterator[Callable[[random.Random], str]]:
        served = Served()
        try:
            yield lambda rng: _case(served, rng)
            served.check_still_serves()
            served.settle()
        finally:
            served.server.close()
            served.executor.close()


def _case(served: Served, rng: random.Random) -> str:
    choice = rng.random()
    if choice < 0.35:
        return _hello(served, rng)
    if choice < 0.5:
        return _plan(served, rng)
    if choice < 0.52:
        return _event(served, rng)
    return _message(served, rng)


def _hello(served: Served, rng: random.Random) -> str:
    served.connections = [c for c in served.connections if not c.closed]
    rank = rng.randrange(N_RANKS)
    hello = served.hello(
        "attacked",
        rank,
        epoch=served.epoch,
        first_step=rng.choice((0, served.step, served.step + 1)),
    )
    raw = hello.SerializeToString() if rng.random() < 0.15 else mutated_raw(hello, rng)
    try:
        connection = served.connect(raw, rank)
    except HandshakeRejected:
        return "hello refused"
    served.connections.append(connection)
    if len(served.connections) > MAX_CONNECTIONS:
        served.connections.pop(rng.randrange(MAX_CONNECTIONS)).close()
    _check_accepted(raw, rank, served)
    return "hello accepted"


def _check_accepted(raw: bytes, rank: int, served: Served) -> None:
    """Only who knows a rank's own token gets in as that rank."""
    hello = data_plane_pb2.Hello.FromString(raw)
    assert hello.rank == rank
    assert (hello.version, hello.server_id) == (PROTOCOL_VERSION, SERVER)
    assert hello.job_id == "attacked"
    _note_epoch(served)


def _note_epoch(served: Served) -> None:
    """Goes on in the job's epoch, which hellos, plans and recoveries raise. Beyond all that are
    given a rank ends its own job on a server; then it is opened again."""
    served.epoch = served.server._machine._jobs["attacked"].epoch
    if served.epoch > MAX_EPOCH:
        _reopen(served)


def _plan(served: Served, rng: random.Random) -> str:
    served.step += rng.choice((0, 1))
    plan = for_server(random_plan(rng, step=served.step, epoch=served.epoch), SERVER)
    message = jobs_pb2.StepPlanned(plan=plan_to_proto(plan, "attacked"))
    raw = message.SerializeToString() if rng.random() < 0.3 else mutated_raw(message, rng)
    event = parsed(jobs_pb2.StepPlanned, raw)
    if event is None:
        return "no plan"
    try:
        decoded = plan_from_proto(event.plan)
        first_tick = first_tick_from_bytes(event.first_tick, decoded.manifest.n_documents)
    except WireError:
        return "plan refused"
    if decoded.manifest.n_ranks != N_RANKS or decoded.manifest.n_nano_batches != N_NANO_BATCHES:
        # The control plane checks what ranks hand in against the job's numbers.
        return "another job's plan"
    served.server.add_plan(
        "attacked", decoded, forward_only=event.forward_only, first_tick=first_tick
    )
    _note_epoch(served)
    return "plan taken"


def _event(served: Served, rng: random.Random) -> str:
    if rng.random() < 0.8:
        served.server.recover("attacked", rng.choice((0, served.epoch, served.epoch + 1)))
        _note_epoch(served)
        return "recovery"
    _reopen(served)
    return "job closed"


def _reopen(served: Served) -> None:
    served.server.close_job("attacked", "fuzz")
    served.open_attacked_job()
    served.epoch = 0


def _message(served: Served, rng: random.Random) -> str:
    live = [connection for connection in served.connections if not connection.closed]
    connection = rng.choice(live) if live else _honest_connection(served, rng)
    wanted = connection.other.offers
    if wanted and rng.random() < 0.7:
        tag = rng.choice(sorted(wanted))
        nbytes = wanted[tag].nbytes
    else:
        tick = Tick(
            served.step, rng.randrange(N_LAYERS + 1), rng.randrange(3), rng.choice(list(Phase))
        )
        tag = tick.tag(reply=rng.random() < 0.3) if rng.random() < 0.5 else rng.randrange(2**31)
        nbytes = rng.randrange(2000)
    if rng.random() < 0.1:
        nbytes = max(0, nbytes + rng.choice((-256, -8, -1, 1, 4, 4096)))
    buffer = served.pool.acquire(nbytes)
    _fill(buffer.tensor, rng)
    connection.put(tag, buffer, 1.0)
    buffer.release()
    return "message" if not connection.closed else "wrong size"


def _honest_connection(served: Served, rng: random.Random) -> LoopbackConnection:
    rank = rng.randrange(N_RANKS)
    hello = served.hello("attacked", rank, epoch=served.epoch)
    connection = served.connect(hello.SerializeToString(), rank)
    served.connections.append(connection)
    return connection


def _fill(tensor: torch.Tensor, rng: random.Random) -> None:
    """Any bytes, or the values that arithmetic stumbles over."""
    choice = rng.randrange(3)
    if choice == 0 and tensor.numel():
        tensor.copy_(torch.frombuffer(bytearray(rng.randbytes(tensor.numel())), dtype=torch.uint8))
    else:
        # Zeros, and NaN in every float.
        tensor.fill_(0 if choice == 1 else 255)
