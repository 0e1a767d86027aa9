"""The tick path end to end on one host: bytes per second, and where the time of a tick goes.

A control plane, one attention node and one trainer rank run as real processes. The trainer sends
ticks one after the other, without overlap, so that each one's parts add up. In the same run bare
ucxx exchanges messages of the same sizes between two processes.

    python -m benchmarks.tick_path --json tick_path.json

Parts of a tick, seen from the trainer:

* kernel: the node's kernel calls, as the node reports them;
* transport: what bare ucxx takes for a request and a reply of these sizes;
* pack: gathering rows into the request;
* rest: everything else: assembling and scattering rows, threads, Python.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.transport import RawSide
from core_attention.manifest import RankManifest
from core_attention.shape import AttentionShape, format_shape
from data_plane.buffer_pool import BufferPool
from data_plane.ucxx.settings import UcxxSettings
from distca.apps.local.process import LocalProcess
from distca.apps.local.supervisor import Supervisor
from distca.v1 import jobs_pb2
from trainer_client import Placement, Session, SessionOptions, StepReport, core_attention

SHAPE = AttentionShape(num_heads=8, num_heads_kv=2, head_dim=64, head_dim_v=64, dtype="float32")
LAYERS = 2
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Workload:
    """Documents of one step.

    Attributes:
        name: for the table.
        lengths: of the documents.
    """

    name: str
    lengths: list[int]


WORKLOADS = (
    Workload("256 documents of 16 tokens", [16] * 256),
    Workload("32 documents of 128 tokens", [128] * 32),
    Workload("4 documents of 1024 tokens", [1024] * 4),
    Workload("1 document of 4096 tokens", [4096]),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One workload. Seconds are of one tick, forward and backward averaged.

    Attributes:
        workload: name.
        tick_bytes: request and reply.
        tick_seconds: sending and waiting.
        gigabytes_per_second: ``tick_bytes / tick_seconds``, 1e9 bytes.
        bare_gigabytes_per_second: of bare ucxx for the same exchange, in the same run.
        without_kernel_ratio: rate of the tick without its kernel / rate of bare ucxx.
        kernel_share, transport_share, pack_share, rest_share: of ``tick_seconds``.
    """

    workload: str
    tick_bytes: float
    tick_seconds: float
    gigabytes_per_second: float
    bare_gigabytes_per_second: float
    without_kernel_ratio: float
    kernel_share: float
    transport_share: float
    pack_share: float
    rest_share: float


class Layers(torch.nn.Module):
    """One core attention after the other, each on the output of the last one."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for _ in range(LAYERS):
            q = core_attention(q, k, v)
        return q


def serve_bare(pipe: Pipe, settings: UcxxSettings) -> None:
    """The other process of bare ucxx: answers requests until it gets None."""
    side, pool = RawSide(settings), BufferPool()
    pipe.send(side.listen())
    side.accept()
    while (sizes := pipe.recv()) is not None:
        request, reply = (pool.acquire(nbytes) for nbytes in sizes)
        receive = side.receive(1, request)
        pipe.send("ready")
        side.wait([receive])
        side.wait([side.send(2, reply)])
        request.release()
        reply.release()


class BareExchange:
    """Requests and replies over bare ucxx with another process."""

    def __init__(self, settings: UcxxSettings) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve_bare, args=(theirs, settings), daemon=True)
        self._process.start()
        self._side, self._pool = RawSide(settings), BufferPool()
        self._side.connect(self._pipe.recv())

    def seconds(self, request_bytes: int, reply_bytes: int, rounds: int = 20) -> float:
        """Median seconds of one exchange."""
        request, reply = self._pool.acquire(request_bytes), self._pool.acquire(reply_bytes)
        request.tensor.fill_(1)
        times = []
        for _ in range(rounds):
            self._pipe.send((request_bytes, reply_bytes))
            self._pipe.recv()
            began = time.perf_counter()
            receive = self._side.receive(2, reply)
            self._side.wait([self._side.send(1, request), receive])
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def close(self) -> None:
        """Ends the other process."""
        self._pipe.send(None)
        self._process.join(10)
        self._process.kill()


def run_step(session: Session, step: int, workload: Workload) -> StepReport:
    """Forward and backward of one step."""
    session.submit(RankManifest.from_lengths(step, 0, [workload.lengths]))
    rows = sum(workload.lengths)
    q = torch.randn(rows, SHAPE.num_heads, SHAPE.head_dim, requires_grad=True)
    k, v = (
        torch.randn(rows, SHAPE.num_heads_kv, SHAPE.head_dim, requires_grad=True) for _ in range(2)
    )
    with session.step(step) as running:
        o = Layers()(q, k, v)
        o.backward(torch.randn_like(o))
    assert running.report is not None
    return running.report


def kernel_seconds(session: Session, step: int) -> float:
    """Kernel seconds that the node reports for a step, once it has."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        measured: jobs_pb2.GetStepResponse = session.fetch_step(step)
        if measured.servers:
            server = measured.servers[0]
            return sum(server.forward_busy_seconds) + sum(server.backward_busy_seconds)
        time.sleep(0.02)
    raise TimeoutError(f"the node reported nothing of step {step} within 10 s")


def measure(
    session: Session, bare: BareExchange, workload: Workload, first: int, steps: int
) -> Result:
    """Runs one workload; ticks of a step are 2 x LAYERS."""
    ticks = 2 * LAYERS
    tick, kernel, pack = [], [], []
    report: StepReport | None = None
    for step in range(first, first + steps + WARM_UP_STEPS):
        report = run_step(session, step, workload)
        if step >= first + WARM_UP_STEPS:
            tick.append((report.send_seconds + report.wait_seconds) / ticks)
            pack.append(report.send_seconds / ticks)
            kernel.append(kernel_seconds(session, step) / ticks)
    assert report is not None
    tick_bytes = (report.sent_bytes + report.received_bytes) / ticks
    bare_seconds = bare.seconds(report.sent_bytes // ticks, report.received_bytes // ticks)
    seconds, kernel_part, pack_part = (statistics.median(x) for x in (tick, kernel, pack))
    return Result(
        workload=workload.name,
        tick_bytes=tick_bytes,
        tick_seconds=seconds,
        gigabytes_per_second=tick_bytes / seconds / 1e9,
        bare_gigabytes_per_second=tick_bytes / bare_seconds / 1e9,
        without_kernel_ratio=bare_seconds / (seconds - kernel_part),
        kernel_share=kernel_part / seconds,
        transport_share=bare_seconds / seconds,
        pack_share=pack_part / seconds,
        rest_share=1 - (kernel_part + bare_seconds + pack_part) / seconds,
    )


def start_services(supervisor: Supervisor, folder: Path) -> str:
    """A control plane and one node; returns the control plane's address."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    address = ""
    for name, arguments in (
        ("control-plane", ["--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0"]),
        (
            "attention-node",
            ["--data-host=127.0.0.1", "--one-host", f"--shape={format_shape(SHAPE)}"],
        ),
    ):
        ready = folder / f"{name}.address"
        where = [f"--control-plane={address}"] if address else []
        process = supervisor.watch(
            LocalProcess(
                name,
                [name, *where, *arguments, f"--address-file={ready}"],
                folder / f"{name}.log",
                environ,
            )
        )
        addresses = json.loads(supervisor.wait_for_file(process, ready))
        address = address or str(addresses["grpc"])
    return address


def main(
    steps: Annotated[int, typer.Option(help="Measured steps of each workload.")] = 10,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the results to this file.")
    ] = None,
) -> None:
    """Measures the tick path on this machine."""
    torch.set_num_threads(1)
    settings = UcxxSettings(one_host=True)
    bare = BareExchange(settings)
    with tempfile.TemporaryDirectory() as name, Supervisor() as supervisor:
        options = SessionOptions(
            control_plane=start_services(supervisor, Path(name)),
            job="tick-path",
            rank=0,
            n_ranks=1,
            n_layers=LAYERS,
            n_nano_batches=1,
            shape=SHAPE,
            placement=Placement.POOL,
            data_host="127.0.0.1",
            one_host=True,
        )
        with Session.open(options) as session:
            results = [
                measure(session, bare, workload, index * (steps + WARM_UP_STEPS), steps)
                for index, workload in enumerate(WORKLOADS)
            ]
    bare.close()
    show(results)
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(result) for result in results], indent=2))


def show(results: list[Result]) -> None:
    """Prints the table."""
    table = Table(title="Tick path, one trainer and one attention node on this host")
    for column in (
        "documents",
        "MB a tick",
        "ms a tick",
        "GB/s",
        "bare ucxx GB/s",
        "ratio without kernel",
        "kernel",
        "transport",
        "pack",
        "rest",
    ):
        table.add_column(column, justify="left" if column == "documents" else "right")
    for result in results:
        table.add_row(
            result.workload,
            f"{result.tick_bytes / 1e6:.1f}",
            f"{result.tick_seconds * 1e3:.1f}",
            f"{result.gigabytes_per_second:.2f}",
            f"{result.bare_gigabytes_per_second:.2f}",
            f"{result.without_kernel_ratio:.2f}",
            f"{result.kernel_share:.0%}",
            f"{result.transport_share:.0%}",
            f"{result.pack_share:.0%}",
            f"{result.rest_share:.0%}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
