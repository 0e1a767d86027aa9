"""The data plane between GPUs of one host: transports against bare libraries, NCCL and copies.

One process a GPU, started together for every round; seconds are from the first process's start to
the last one's end, medians. ucxx, nixl and NCCL have processes of their own, one library after the
other, since each of the first two brings a UCX. Four parts:

* flow: messages from one GPU to another, received into buffers that were offered before;
* tick: what a tick does but for its kernel: rows are packed into requests, each request is answered
  with a reply, and the replies' rows are unpacked. The bare libraries exchange messages of the
  same sizes, already packed;
* ping-pong: such ticks one after the other, two of them under way at a time;
* all-to-all: every GPU sends an equal share of its bytes to every other one.

    python -m benchmarks.gpu.data_plane --gpus 4 --json data_plane.json
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.data_plane_sides import SIDES, Buffers, Place, Side, gather
from core_attention.ca_task import Phase
from core_attention.message import MessageLayout, reply_layout, request_layout
from core_attention.message_rows import MessageRows, message_rows
from core_attention.routing import PairRoute
from core_attention.shape import AttentionShape
from data_plane.buffer_pool import BufferPool, PooledBuffer
from data_plane.owner_thread import SWITCH_INTERVAL_SECONDS

MIB = 2**20
PARTS = ("flow", "tick", "ping-pong", "all-to-all")
GROUPS = ({"raw ucxx", "ucxx"}, {"raw nixl", "nixl"}, {"NCCL"})
WARM_UPS = 3
TICKS = 16
"""In a round of the ping-pong."""

SPIN_SECONDS = 120.0
RUN_ROWS = 1024
"""Rows of a message lie in pieces of so many, in no order."""

SHAPE = AttentionShape(num_heads=32, num_heads_kv=8, head_dim=128, head_dim_v=128, dtype="bfloat16")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One library, one size.

    Attributes:
        part: of ``PARTS``.
        library: whose.
        gpus: that take part.
        message_mib: of each message (flow), of each request (tick, ping-pong), of a rank's data
            (all-to-all).
        messages: under way at a time.
        gigabytes_per_second: 1e9 bytes per second: of all messages; in all-to-all, of what one GPU
            sends to others.
        slowest, fastest: of the rounds.
    """

    part: str
    library: str
    gpus: int
    message_mib: float
    messages: int
    gigabytes_per_second: float
    slowest: float
    fastest: float


class Starter:
    """Lets all processes go on at once: they spin on shared memory.

    Args:
        counters: one for each process.
        rank: of this process.
    """

    def __init__(self, counters: Any, rank: int) -> None:
        self._counters = np.frombuffer(counters, dtype=np.int64)
        self._rank = rank
        self._round = 0

    def meet(self) -> None:
        """Returns when every process has come."""
        self._round += 1
        self._counters[self._rank] = self._round
        deadline = time.monotonic() + SPIN_SECONDS
        while int(self._counters.min()) < self._round:
            if time.monotonic() > deadline:
                raise TimeoutError("another process did not come")


@dataclass(frozen=True, eq=False)
class Process:
    """What every part needs of its process."""

    rank: int
    n_ranks: int
    starter: Starter
    pool: BufferPool
    rounds: int

    def timed(self, prepare: Callable[[], None], run: Callable[[], None]) -> list[float]:
        """Seconds of each round, over all processes."""
        spans = []
        for number in range(WARM_UPS + self.rounds):
            prepare()
            torch.cuda.synchronize()
            self.starter.meet()
            # What was posted has reached the owner threads.
            time.sleep(2e-3)
            self.starter.meet()
            begin = time.perf_counter()
            run()
            if number >= WARM_UPS:
                spans.append((begin, time.perf_counter()))
        by_rank = np.array(gather(spans))
        seconds = by_rank[:, :, 1].max(axis=0) - by_rank[:, :, 0].min(axis=0)
        return [float(each) for each in seconds]

    def filled(self, nbytes: int, value: int) -> PooledBuffer:
        buffer = self.pool.acquire(nbytes)
        buffer.tensor.fill_(value)
        return buffer


def summarize(
    part: str,
    library: str,
    gpus: int,
    mib: float,
    messages: int,
    nbytes: int,
    seconds: Sequence[float],
) -> Measurement:
    rates = [nbytes / each / 1e9 for each in seconds]
    return Measurement(
        part=part,
        library=library,
        gpus=gpus,
        message_mib=mib,
        messages=messages,
        gigabytes_per_second=nbytes / statistics.median(seconds) / 1e9,
        slowest=min(rates),
        fastest=max(rates),
    )


def flow(process: Process, name: str, side: Side, mib: int, messages: int) -> Measurement:
    """Messages from rank 0 to rank 1; further ranks watch."""
    rank, nbytes = process.rank, mib * MIB
    sends: Buffers = {}
    receives: Buffers = {}
    if rank == 0:
        sends = {(1, key): process.filled(nbytes, key + 1) for key in range(messages)}
    if rank == 1:
        receives = {(0, key): process.filled(nbytes, 0) for key in range(messages)}
    seconds = exchange(process, side, sends, receives)
    for (_, key), buffer in receives.items():
        check(buffer, key + 1, name)
    release(sends, receives)
    return summarize("flow", name, 2, mib, messages, nbytes * messages, seconds)


def all_to_all(process: Process, name: str, side: Side, mib: int) -> Measurement:
    """Every rank's data, in equal shares to all ranks; its own share is not counted."""
    others = [(process.rank + step) % process.n_ranks for step in range(1, process.n_ranks)]
    share = mib * MIB // process.n_ranks
    sends = {(peer, 0): process.filled(share, process.rank + 1) for peer in others}
    receives = {(peer, 0): process.filled(share, 0) for peer in others}
    seconds = exchange(process, side, sends, receives)
    for (peer, _), buffer in receives.items():
        check(buffer, peer + 1, name)
    release(sends, receives)
    nbytes = share * len(others)
    return summarize("all-to-all", name, process.n_ranks, mib, len(others), nbytes, seconds)


def exchange(process: Process, side: Side, sends: Buffers, receives: Buffers) -> list[float]:
    """Seconds of rounds in which everything is sent and received."""
    side.expose(receives)

    def prepare() -> None:
        for place in receives:
            side.receive(place)

    def run() -> None:
        for place, buffer in sends.items():
            side.send(place, buffer)
        for place in receives:
            side.wait_received(place)
        side.wait_sent()

    return process.timed(prepare, run)


class TickRows:
    """The rows of one tick's message between two GPUs, and where they come from and go to."""

    def __init__(self, request_bytes: int, device: torch.device) -> None:
        row_bytes = request_layout(_route(RUN_ROWS), SHAPE, Phase.FORWARD).nbytes // RUN_ROWS
        route = _route(max(request_bytes // row_bytes // RUN_ROWS, 1) * RUN_ROWS)
        self.request: MessageLayout = request_layout(route, SHAPE, Phase.FORWARD)
        self.reply: MessageLayout = reply_layout(route, SHAPE, Phase.FORWARD)
        q_rows, kv_rows = (
            torch.from_numpy(rows).to(device) for rows in (route.q_rows, route.kv_rows)
        )
        self.rows: MessageRows = message_rows(self.request, self.reply, q_rows, kv_rows)
        self.inputs = _packed(self.request, device)
        self.outputs = _packed(self.reply, device)


def tick(
    process: Process, name: str, side: Side, mib: int, messages: int, *, lanes: int = 1
) -> Measurement:
    """Rank 0 is the trainer, rank 1 the server; bare libraries neither pack nor unpack.

    Args:
        lanes: 1: a round is one tick. 2: it is ``TICKS`` of them, two under way at a time, as the
            two nano-batches of ping-pong have them.
    """
    rank, raw = process.rank, not name.startswith(("ucxx", "nixl"))
    rows = TickRows(mib * MIB, torch.device("cuda", rank))
    sizes = (rows.request.nbytes, rows.reply.nbytes)
    outgoing, incoming = sizes if rank == 0 else sizes[::-1]
    n_ticks = 1 if lanes == 1 else TICKS
    keys = range(lanes * messages if rank < 2 else 0)
    sends = {(1 - rank, key): process.filled(outgoing, 1) for key in keys}
    receives = {(1 - rank, key): process.filled(incoming, 0) for key in keys}
    side.expose(receives)

    def of_lane(number: int) -> list[Place]:
        lane = number % lanes
        return list(sends)[lane * messages : (lane + 1) * messages]

    def prepare() -> None:
        for place in receives:
            side.receive(place)

    def dispatch(number: int) -> None:
        for place in of_lane(number):
            ready = None
            if number >= lanes:
                side.receive(place)
            if not raw:
                rows.rows.pack(sends[place].tensor, rows.inputs)
                packed = torch.cuda.Event()
                packed.record()
                ready = packed.query
            side.send(place, sends[place], ready)

    def collect(number: int) -> None:
        for place in of_lane(number):
            side.wait_received(place)
            if not raw:
                rows.rows.unpack(receives[place].tensor, rows.outputs, {})

    def trainer() -> None:
        for number in range(n_ticks + lanes):
            if number >= lanes:
                collect(number - lanes)
            if number < n_ticks:
                dispatch(number)
        side.wait_sent()
        torch.cuda.synchronize()

    def server() -> None:
        for number in range(n_ticks):
            for place in of_lane(number):
                side.wait_received(place)
                if number + lanes < n_ticks:
                    side.receive(place)
                side.send(place, sends[place])
        side.wait_sent()

    seconds = process.timed(prepare, trainer if rank == 0 else server)
    release(sends, receives)
    part = "tick" if lanes == 1 else "ping-pong"
    nbytes = n_ticks * sum(sizes) * messages
    return summarize(part, name, 2, mib, messages, nbytes, seconds)


def peer_copies(process: Process, mib: int) -> Iterator[Measurement]:
    """The limit: device copies that one process starts, for a flow and for an all-to-all."""
    n_ranks = process.n_ranks
    for part, pairs, nbytes in (
        ("flow", [(0, 1)], mib * MIB),
        (
            "all-to-all",
            [(a, (a + step) % n_ranks) for step in range(1, n_ranks) for a in range(n_ranks)],
            mib * MIB // n_ranks,
        ),
    ):
        copies: list[tuple[torch.Tensor, torch.Tensor, torch.cuda.Stream]] = []
        if process.rank == 0:
            for source, target in pairs:
                tensors = [
                    torch.ones(nbytes, dtype=torch.uint8, device=f"cuda:{gpu}")
                    for gpu in (source, target)
                ]
                copies.append((tensors[0], tensors[1], torch.cuda.Stream(source)))

        def run(copies: list[Any] = copies) -> None:
            for source, target, stream in copies:
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
            for _, _, stream in copies:
                stream.synchronize()

        seconds = process.timed(lambda: None, run)
        per_gpu = nbytes * len(pairs) // (1 if part == "flow" else n_ranks)
        gpus = 2 if part == "flow" else n_ranks
        yield summarize(part, "peer copy", gpus, mib, len(pairs) // gpus or 1, per_gpu, seconds)


def nccl_all_to_all(process: Process, mib: int) -> Measurement:
    """NCCL's own collective; the share that stays is copied by it too, and not counted."""
    nbytes = mib * MIB
    source = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)

    def run() -> None:
        dist.all_to_all_single(target, source)
        torch.cuda.synchronize()

    seconds = process.timed(lambda: None, run)
    n_ranks = process.n_ranks
    moved = nbytes * (n_ranks - 1) // n_ranks
    return summarize("all-to-all", "NCCL", n_ranks, mib, n_ranks - 1, moved, seconds)


def check(buffer: PooledBuffer, value: int, name: str) -> None:
    """Raises unless every byte is ``value``."""
    if not bool((buffer.tensor == value).all()):
        raise AssertionError(f"{name} delivered wrong bytes")


def release(*buffers: Buffers) -> None:
    for each in buffers:
        for buffer in each.values():
            buffer.release()


def _route(n_rows: int) -> PairRoute:
    """Equally many rows of queries and of keys, in shuffled runs."""
    n_runs = n_rows // RUN_ROWS
    begins = np.random.default_rng(0).permutation(2 * n_runs)[:n_runs] * RUN_ROWS
    length = np.full(n_runs, RUN_ROWS, dtype=np.int64)
    nothing = np.zeros(n_runs, dtype=np.int64)
    return PairRoute(
        rank=0,
        server=1,
        task=np.arange(n_runs),
        q_row=begins,
        q_length=length,
        kv_document=nothing,
        kv_offset=nothing,
        kv_row=begins,
        kv_length=length,
    )


def _packed(layout: MessageLayout, device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of twice as many rows as a message takes."""
    return {
        section.name: torch.ones(
            2 * section.shape[0],
            *section.shape[1:],
            dtype=getattr(torch, section.dtype),
            device=device,
        )
        for section in layout.sections
    }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be measured."""

    gpus: int
    libraries: Sequence[str]
    parts: Sequence[str]
    flow_mib: Sequence[int]
    tick_mib: Sequence[int]
    all_to_all_mib: Sequence[int]
    messages: Sequence[int]
    rounds: int


def run_rank(rank: int, plan: Plan, counters: Any, store: str, results: Any) -> None:
    """One process: all parts."""
    # As in an attention node.
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=plan.gpus,
        device_id=torch.device("cuda", rank),
    )
    process = Process(
        rank=rank,
        n_ranks=plan.gpus,
        starter=Starter(counters, rank),
        pool=BufferPool.on_device(f"cuda:{rank}"),
        rounds=plan.rounds,
    )
    sides = {name: SIDES[name](rank, plan.gpus) for name in plan.libraries}
    measurements = list(measure(process, plan, sides))
    if rank == 0:
        results.put(measurements)
    for side in sides.values():
        side.close()
    dist.destroy_process_group()


def measure(process: Process, plan: Plan, sides: dict[str, Side]) -> Iterator[Measurement]:
    """Every part, the libraries one after the other at each size."""
    both_ways = {name: side for name, side in sides.items() if name != "NCCL"}
    if "flow" in plan.parts:
        for mib in plan.flow_mib:
            for messages in plan.messages:
                for name, side in sides.items():
                    yield flow(process, name, side, mib, messages)
    if "tick" in plan.parts:
        for mib in plan.tick_mib:
            for messages in plan.messages:
                for name, side in both_ways.items():
                    yield tick(process, name, side, mib, messages)
    if "ping-pong" in plan.parts:
        for mib in plan.tick_mib:
            for messages in plan.messages:
                for name, side in both_ways.items():
                    yield tick(process, name, side, mib, messages, lanes=2)
    if "all-to-all" in plan.parts:
        for mib in plan.all_to_all_mib:
            for name, side in both_ways.items():
                yield all_to_all(process, name, side, mib)
            if "NCCL" in sides:
                yield nccl_all_to_all(process, mib)
                yield from peer_copies(process, mib)


def run(plan: Plan) -> list[Measurement]:
    """Starts a process for each GPU and returns what was measured."""
    context = multiprocessing.get_context("spawn")
    counters = RawArray(ctypes.c_int64, plan.gpus)
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [
            context.Process(
                target=run_rank, args=(rank, plan, counters, store, results), daemon=True
            )
            for rank in range(plan.gpus)
        ]
        for process in processes:
            process.start()
        try:
            while results.empty():
                if any(process.exitcode not in (None, 0) for process in processes):
                    raise RuntimeError("a process failed; see what it printed")
                time.sleep(0.1)
            measurements: list[Measurement] = results.get()
            for process in processes:
                process.join(30)
        finally:
            for process in processes:
                process.kill()
    return measurements


def show(measurements: Sequence[Measurement], libraries: Sequence[str]) -> None:
    """A table for each part: sizes down, libraries across."""
    for part in dict.fromkeys(each.part for each in measurements):
        chosen = [each for each in measurements if each.part == part]
        names = [
            name for name in (*libraries, "peer copy") if any(e.library == name for e in chosen)
        ]
        table = Table(title=f"{part}, GB/s (slowest round)")
        for column in ("GPUs", "MiB", "messages", *names):
            table.add_column(column, justify="right")
        sizes: dict[tuple[int, float, int], dict[str, str]] = {}
        for each in chosen:
            # A copy has no messages under way beside it.
            row = (each.gpus, each.message_mib, each.messages)
            sizes.setdefault(row, {})[each.library] = (
                f"{each.gigabytes_per_second:.1f} ({each.slowest:.1f})"
            )
        for (gpus, mib, messages), cells in sizes.items():
            cell = [cells.get(name, "") for name in names]
            table.add_row(str(gpus), f"{mib:g}", str(messages), *cell)
        Console(width=140).print(table)


def main(
    gpus: Annotated[int, typer.Option(min=2, help="GPUs of this host.")] = 2,
    library: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(SIDES)}; may be repeated.")
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(PARTS)}; may be repeated.")
    ] = None,
    flow_mib: Annotated[list[int], typer.Option(help="Message sizes.")] = [1, 16, 64, 256, 1024],  # noqa: B006
    tick_mib: Annotated[list[int], typer.Option(help="Request sizes.")] = [16, 64, 256],  # noqa: B006
    all_to_all_mib: Annotated[list[int], typer.Option(help="A rank's data.")] = [64, 256, 1024],  # noqa: B006
    messages: Annotated[list[int], typer.Option(help="Messages under way.")] = [1, 4],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=3)] = 15,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """The data plane between GPUs, against bare libraries, NCCL and peer copies."""
    libraries = library or list(SIDES)
    if unknown := set(libraries) - SIDES.keys():
        raise typer.BadParameter(f"library is {unknown.pop()!r}; valid: {', '.join(SIDES)}")
    if unknown := set(part or PARTS) - set(PARTS):
        raise typer.BadParameter(f"part is {unknown.pop()!r}; valid: {', '.join(PARTS)}")
    plan = Plan(
        gpus=gpus,
        libraries=libraries,
        parts=part or PARTS,
        flow_mib=flow_mib,
        tick_mib=tick_mib,
        all_to_all_mib=all_to_all_mib,
        messages=messages,
        rounds=rounds,
    )
    measurements = []
    for together in GROUPS:
        if chosen := [name for name in libraries if name in together]:
            measurements += run(replace(plan, libraries=chosen))
    show(measurements, libraries)
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(each) for each in measurements], indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
