"""A job: a process for each server, and a control plane that decides who is alive.

Ranks 0..R-1 train, and serve *in place*; servers R..S-1 are a *pool* and only serve. Every process
makes the plans itself, from the same lengths. At the end of each tick all report whom they lost;
a process that has ended cannot report, and its pipe says so:

    dead = union of all reports + all that are gone

One place decides, once a tick, so no two processes can ever disagree about who serves what.
"""

import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from examples.nano_distca.documents import NanoBatch, two_lanes
from examples.nano_distca.exchange import Death, Event, Exchange
from examples.nano_distca.lanes import Home, Weights, take_turns, ticks_of
from examples.nano_distca.plan import Plan, make_plan
from examples.nano_distca.tasks import Cost, Shape
from examples.nano_distca.wire import DEADLINE, Wire


@dataclass(frozen=True)
class Job:
    """A step of two nano-batches on ``n_servers`` processes, the first of which are the ranks.

    ``x`` and ``dy``, ``[tokens, hidden]`` of each lane, are the model's input and the gradient of
    its output. Lanes take turns with ``ping_pong``; a server that is no rank may die.
    """

    lanes: tuple[NanoBatch, NanoBatch]
    n_servers: int
    x: tuple[torch.Tensor, ...]
    dy: tuple[torch.Tensor, ...]
    weights: Weights
    cost: Cost = field(default_factory=lambda: Cost(Shape()))
    tolerance: float = 0.05
    ping_pong: bool = True
    bytes_per_second: float = 1e12
    death: Death | None = None

    @property
    def plans(self) -> list[Plan]:
        return [make_plan(b, self.n_servers, self.cost, self.tolerance) for b in self.lanes]


class Done(NamedTuple):
    """The end of a step: gradients of the weights and, as ``x0`` and ``x1``, of the lanes' inputs;
    what each process did; which are dead. Of one process, or of the job."""

    gradients: dict[str, torch.Tensor]
    events: dict[int, list[Event]]
    dead: set[int]

    @property
    def seconds(self) -> float:
        events = [event for each in self.events.values() for event in each]
        return max(e.end for e in events) - min(e.begin for e in events)


def random_job(
    lengths: Sequence[int], n_ranks: int, n_servers: int, layers: int = 2, seed: int = 0
) -> Job:
    """Random numbers for documents of these lengths."""
    generator, shape, hidden = torch.Generator().manual_seed(seed), Shape(), 64
    lanes = two_lanes(lengths, n_ranks)
    x, dy = (
        tuple(torch.randn(b.tokens, hidden, generator=generator) for b in lanes) for _ in range(2)
    )
    inner, kv = shape.heads * shape.head_dim, shape.heads_kv * shape.head_dim
    sizes = {"qkv": (hidden, inner + 2 * kv), "out": (inner, hidden)}
    sizes |= {"up": (hidden, 4 * hidden), "down": (4 * hidden, hidden)}
    weights = {}
    for name, size in sizes.items():
        weights[name] = torch.randn(layers, *size, generator=generator) * size[0] ** -0.5
    return Job(lanes, n_servers, x, dy, weights)


def run(job: Job) -> Done:
    """Runs the step in processes of its own; raises RuntimeError if a rank ends."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch.fx.experimental.symbolic_shapes"])
    pipes: list[Connection] = []
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for me in range(job.n_servers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_process, args=(me, job, theirs, folder))
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _decide(pipes, job.lanes[0].n_ranks)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _decide(pipes: Sequence[Connection], n_ranks: int) -> Done:
    """The control plane: hears all, decides, and answers all, until they are done."""
    dead: set[int] = set()
    while True:
        reports: dict[int, set[int] | Done] = {}
        for process, pipe in enumerate(pipes):
            if process in dead:
                continue
            if not pipe.poll(DEADLINE.total_seconds()):
                raise TimeoutError(f"process {process} has not reported for {DEADLINE}")
            try:
                reports[process] = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError):
                dead.add(process)
        dead = dead.union(*(each for each in reports.values() if isinstance(each, set)))
        if lost := dead & {*range(n_ranks)}:
            raise RuntimeError(f"ranks {lost} ended: their rows are gone")
        if done := [each for each in reports.values() if isinstance(each, Done)]:
            gradients = {}
            for name in done[0].gradients:
                parts = [each.gradients[name] for each in done[:n_ranks]]
                is_row = name.startswith("x")
                gradients[name] = torch.cat(parts) if is_row else torch.stack(parts).sum(0)
            return Done(gradients, {p: e for each in done for p, e in each.events.items()}, dead)
        for process in reports.keys() - dead:
            pipes[process].send(dead)


def _process(me: int, job: Job, pipe: Connection, folder: str) -> None:
    torch.set_num_threads(1)
    wire = Wire(me, job.n_servers, folder, job.weights["qkv"].dtype, job.bytes_per_second)

    def settle(lost: set[int]) -> set[int]:
        pipe.send(lost)
        dead: set[int] = pipe.recv()
        return dead

    weights = {name: w.clone().requires_grad_() for name, w in job.weights.items()}
    exchange = Exchange(me, job.lanes, job.plans, job.cost.shape, wire, settle, job.death)
    homes: list[Home | None] = [None for _ in job.lanes]
    if me < job.lanes[0].n_ranks:
        each = zip(job.lanes, job.x, job.dy, strict=True)
        homes = [Home(b.rows(me), x, dy, weights, job.cost.shape) for b, x, dy in each]
    settle(set())  # All are there: the clock starts.
    layers = len(weights["qkv"])
    lanes = [ticks_of(lane, layers, exchange, home) for lane, home in enumerate(homes)]
    for together in [lanes] if job.ping_pong else [[lane] for lane in lanes]:
        take_turns(together)
    gradients = {f"x{lane}": home.dx for lane, home in enumerate(homes) if home}
    gradients |= {name: w.grad for name, w in weights.items() if w.grad is not None}
    pipe.send_bytes(pickle.dumps(Done(gradients, {me: exchange.events}, set())))
