"""Training steps of a Llama on the GPUs of one host, with core attention spread in several ways.

Every way runs the same documents, the same model and the same FSDP2, in one run:

* plain: whole documents, packed in order, attention at home;
* repacked: whole documents, moved between ranks so that work is as equal as memory allows;
* context-parallel: every document cut over all ranks, keys and values gathered;
* pytorch-context-parallel: PyTorch's own ring, on batches of one document (``--lengths
  one-document``, which plain and repacked cannot hold);
* context-parallel-unsent: the same with nothing sent, which is how fast it would be if all its
  messages were hidden; its losses mean nothing;
* disaggregated: DistCA in place, with a real control plane, real sessions and UCX;
* sealed: the same with checksums, as between hosts;
* pool: DistCA with attention nodes on GPUs of their own (``--ranks 3 --pool-nodes 1 --ways pool``).

    python -m benchmarks.gpu.end_to_end --layers 8 --tokens-per-rank 131072 --json out.json

*Headroom* is how much faster plain packing's step would be if its attention were spread evenly and
nothing else changed.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.training import methods
from benchmarks.gpu.training.batches import ONE_DOCUMENT, Batch, draw_batch
from benchmarks.gpu.training.methods import Disaggregated, RankSettings
from benchmarks.gpu.training.rank_processes import joined, launch_in_time, let_go, spawned
from benchmarks.gpu.training.stack import ModelShape
from benchmarks.gpu.training.trace import traced
from core_attention.profiling import device_name
from core_attention.shape import AttentionShape, format_shape
from distca.apps.local.process import LocalProcess
from distca.apps.local.supervisor import Supervisor

PEAK_FLOPS = 989e12
"""Dense bfloat16 of an H200, by its data sheet; what MFU is a share of."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    Attributes:
        model: sizes.
        tokens_per_rank: of a step; also the longest document, unless there is only one.
        ranks: GPUs.
        seeds: of the batches.
        warm_ups: steps before them, on the first ones.
        ways: names, see ``methods.METHODS``.
        distribution: of document lengths; see ``batches.draw_batch``.
        stretch: documents are that many times as long.
        tolerance: eps.
        device: ``"cuda"`` or ``"cpu"``.
        compiled: whether parts of the layers are compiled.
        traced: ways of which steps are run once more under the profiler.
        traced_batches: how many, the first ones.
        pool_nodes: attention nodes, on the GPUs behind those of the ranks.
        cuts_documents: whether DistCA's ways may cut a document between two nano-batches.
        memory_gib: of a device that PyTorch may hold, message buffers apart; None: all of it.
            Within a limit its cache frees idle blocks where it would otherwise ask for more memory.
    """

    model: ModelShape
    tokens_per_rank: int
    ranks: int
    seeds: tuple[int, ...]
    warm_ups: int
    ways: tuple[str, ...]
    distribution: str
    tolerance: float
    device: str
    compiled: bool
    traced: tuple[str, ...]
    traced_batches: int = 1
    stretch: int = 1
    pool_nodes: int = 0
    memory_gib: float | None = None
    cuts_documents: bool = False

    def drawn(self) -> list[Batch]:
        """All batches: first those to warm up on."""
        measured = [
            draw_batch(seed, self.ranks, self.tokens_per_rank, self.distribution, self.stretch)
            for seed in self.seeds
        ]
        return [measured[i % len(measured)] for i in range(self.warm_ups)] + measured

    @property
    def n_nano_batches(self) -> int:
        """Of DistCA's ways. One document that may not be cut lies within one."""
        return 1 if self.distribution == ONE_DOCUMENT and not self.cuts_documents else 2

    def require_runnable(self) -> None:
        """Raises ValueError, which says why, if a way cannot run a batch."""
        for batch in self.drawn():
            for way in self.ways:
                methods.require_runnable(way, batch, self.device)

    def n_devices(self, way: str) -> int:
        """Devices that ``way`` uses."""
        return self.ranks + (self.pool_nodes if way == methods.POOL else 0)

    def n_traced(self, way: str) -> int:
        """Steps of ``way`` that are traced, after all others."""
        if self.device != "cuda" or way not in self.traced:
            return 0
        return min(self.traced_batches, len(self.seeds))


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One step of one way.

    Attributes:
        seed: of the batch.
        seconds: from all ranks ready to all ranks done.
        tokens_per_second: of all ranks.
        mfu: model FLOPs (recomputation not counted) over the peak of all GPUs, those of attention
            nodes included.
        loss: of all ranks.
        attention_seconds: by rank, device time of core attention where the rank runs it alone;
            with DistCA what the servers report, in which other kernels run beside it.
        imbalance: of them, max over mean.
        waits: by rank, seconds by name; DistCA's are of the training thread, which on GPUs runs
            ahead of the device.
        extra: of rank 0.
    """

    seed: int
    seconds: float
    tokens_per_second: float
    mfu: float
    loss: float
    attention_seconds: list[float]
    imbalance: float
    waits: list[dict[str, float]]
    extra: dict[str, Any]


def run_way(name: str, plan: Plan, drawn: Sequence[Batch], settings: RankSettings) -> None:
    """Measures one way on the batches ``drawn``.

    Rank 0 writes what has been found after every step, so that a run that is interrupted leaves the
    steps before."""
    on_gpu = settings.device.type == "cuda"
    began = time.perf_counter()
    way = methods.make(name, settings)
    again = drawn[plan.warm_ups :][: plan.n_traced(name)]
    found: dict[str, Any] = {"way": name, "steps": [], "memory": [], "traces": []}
    try:
        way.prepare([*drawn, *again])
        found["prepare_seconds"] = time.perf_counter() - began
        for step, batch in enumerate(drawn):
            if on_gpu and step == plan.warm_ups:
                torch.cuda.reset_peak_memory_stats()
            result = run_step(way, step, batch, settings, n_devices=plan.n_devices(name))
            memory = gathered(_memory(way) if on_gpu else {})
            if settings.rank == 0:
                print(_line(name, step, result, memory), flush=True)
            if step >= plan.warm_ups:
                found["steps"].append(asdict(result))
                found["memory"] = memory
                _keep(found, settings)
        for i in range(len(again)):
            found["traces"].append(_traced_step(way, len(drawn) + i, settings))
            _keep(found, settings)
    finally:
        way.close()


def _line(name: str, step: int, result: StepResult, memory: list[dict[str, float]]) -> str:
    peak = ", ".join(
        f"{title} {max(rank[f'{title}_gib'] for rank in memory):.1f} GiB"
        for title in ("allocated", "reserved", "buffers", "device")
        if f"{title}_gib" in memory[0]
    )
    return (
        f"{name} step {step}: {result.seconds:.3f} s, loss {result.loss:.5f}, "
        f"imbalance {result.imbalance:.3f}, attention by rank, s: "
        + " ".join(f"{seconds:.3f}" for seconds in result.attention_seconds)
        + (f"; peak {peak}" if peak else "")
    )


def _keep(found: dict[str, Any], settings: RankSettings) -> None:
    if settings.rank == 0:
        partial = settings.folder / "partial"
        partial.write_text(json.dumps(found))
        partial.replace(settings.folder / f"{found['way']}.json")


def run_step(
    way: methods.Method, step: int, batch: Batch, settings: RankSettings, *, n_devices: int
) -> StepResult:
    """One step of a way on ``n_devices`` devices, timed from when all ranks are ready until all
    are done."""
    gc.collect()
    settle(settings.device)
    began = time.perf_counter()
    measured = way.run(step)
    settle(settings.device)
    seconds = time.perf_counter() - began
    way.finish(step, measured)
    everyone = gathered((float(measured.loss), measured.seconds, measured.extra))
    extra = everyone[0][2]
    busy = extra.get("busy_seconds") or [
        sum(t for name, t in waits.items() if name.startswith("attention"))
        for _, waits, _ in everyone
    ]
    tokens = settings.n_ranks * settings.tokens_per_rank
    flops = settings.model.step_flops(tokens, batch.qk_pairs)
    return StepResult(
        seed=batch.seed,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        mfu=flops / seconds / (PEAK_FLOPS * n_devices),
        loss=sum(loss for loss, _, _ in everyone),
        attention_seconds=busy,
        imbalance=extra.get("measured_imbalance") or methods.imbalance(busy),
        waits=[waits for _, waits, _ in everyone],
        extra=extra,
    )


def gathered(value: Any) -> list[Any]:
    """``value`` of every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def settle(device: torch.device) -> None:
    """Returns when all ranks, and what they have launched, have come here."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


def _memory(way: methods.Method) -> dict[str, float]:
    """What PyTorch has held at most, what message buffers hold, and what is in use in all."""
    free, total = torch.cuda.mem_get_info()
    buffers = {"buffers_gib": way.buffer_bytes / 2**30} if isinstance(way, Disaggregated) else {}
    return buffers | {
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "device_gib": (total - free) / 2**30,
    }


def _limit_memory(gib: float | None) -> None:
    if gib is not None:
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(gib * 2**30 / total, 1.0))


def _traced_step(way: methods.Method, step: int, settings: RankSettings) -> dict[str, Any]:
    """A step under the profiler: where rank 0's time goes, and every rank's kernel seconds of core
    attention, which do not count what a kernel waits for the device."""

    def run() -> None:
        measured = way.run(step)
        settle(settings.device)
        way.finish(step, measured)

    settle(settings.device)
    found = traced(run)
    busy = gathered(found["by_category"].get("attention", 0.0))
    return {"attention_seconds": busy, "imbalance": methods.imbalance(busy)} | (
        found if settings.rank == 0 else {}
    )


def run_rank(rank: int, plan: Plan, folder: Path) -> None:
    """A rank's process: all ways, one after the other; rank 0 writes the results."""
    launch_in_time(rank)
    on_gpu = plan.device == "cuda"
    with joined(rank, plan.ranks, on_gpu=on_gpu, rendezvous=folder / "rendezvous") as device:
        if on_gpu:
            _limit_memory(plan.memory_gib)
        drawn = plan.drawn()
        settings = RankSettings(
            rank=rank,
            n_ranks=plan.ranks,
            device=device,
            model=plan.model,
            tokens_per_rank=plan.tokens_per_rank,
            longest_document=max(int(batch.lengths.max()) for batch in drawn),
            n_nano_batches=plan.n_nano_batches,
            cuts_documents=plan.cuts_documents,
            tolerance=plan.tolerance,
            compiled=plan.compiled,
            learning_rate=1e-4,
            folder=folder,
        )
        for name in plan.ways:
            run_way(name, plan, drawn, settings)
            let_go(device)


def measure(plan: Plan) -> list[dict[str, Any]]:
    """Starts a control plane and the ranks; returns the ways' results, of a run that failed or was
    interrupted what there is."""
    with tempfile.TemporaryDirectory() as name, Supervisor() as supervisor:
        folder = Path(name)
        if _needs_service(plan):
            _start_services(supervisor, folder, plan)
        with spawned(run_rank, (plan, folder), plan.ranks) as ranks:
            try:
                while not ranks.join():
                    pass
            except (Exception, KeyboardInterrupt) as error:
                print(f"{type(error).__name__}: {error}", flush=True)
                log = folder / "control-plane.log"
                if log.exists():
                    print(log.read_text()[-4000:], flush=True)
        found = [folder / f"{way}.json" for way in plan.ways]
        return [json.loads(path.read_text()) for path in found if path.exists()]


def _needs_service(plan: Plan) -> bool:
    return any(way not in methods.AT_HOME for way in plan.ways)


def start_control_plane(supervisor: Supervisor, folder: Path) -> LocalProcess:
    """Starts a control plane and does not wait for it; it writes its address into ``folder``."""
    return supervisor.watch(
        LocalProcess(
            "control plane",
            [
                "control-plane",
                "--listen=127.0.0.1:0",
                "--metrics-listen=127.0.0.1:0",
                f"--address-file={folder / methods.ADDRESS_FILE}",
            ],
            folder / "control-plane.log",
            dict(os.environ),
        )
    )


def _start_services(supervisor: Supervisor, folder: Path, plan: Plan) -> None:
    """Starts the control plane, and does not wait for it without need: at its first start it
    compiles the planner for a while. Attention nodes have joined when this returns."""
    control_plane = start_control_plane(supervisor, folder)
    if not plan.pool_nodes:
        return
    address = json.loads(supervisor.wait_for_file(control_plane, folder / methods.ADDRESS_FILE))
    on_gpu = plan.device == "cuda"
    devices = [f"cuda:{plan.ranks + i}" if on_gpu else "cpu" for i in range(plan.pool_nodes)]
    shape = plan.model.attention
    start_nodes(supervisor, folder, address["grpc"], shape, devices, profiles=folder)


def start_nodes(
    supervisor: Supervisor,
    folder: Path,
    control_plane: str,
    shape: AttentionShape,
    devices: Sequence[str],
    *,
    profiles: Path,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Starts an attention node on each of ``devices``, with cost profiles in ``profiles`` and
    its other files in ``folder``; all have joined when this returns."""
    started = []
    for index, device in enumerate(devices):
        ready = folder / f"node-{index}.address"
        node = LocalProcess(
            f"attention node {index}",
            [
                "attention-node",
                f"--control-plane={control_plane}",
                f"--server-id=node-{index}",
                f"--shape={format_shape(shape)}",
                f"--device={device}",
                "--data-host=127.0.0.1",
                "--one-host",
                f"--profile-dir={profiles}",
                f"--address-file={ready}",
            ],
            folder / f"node-{index}.log",
            environ,
        )
        started.append((supervisor.watch(node), ready))
    for node, ready in started:
        supervisor.wait_for_file(node, ready)


def headroom(plain: dict[str, Any]) -> list[float]:
    """By step: how much faster it would be with attention spread evenly."""
    gains = []
    for step in plain["steps"]:
        attention = step["attention_seconds"]
        even = step["seconds"] - max(attention) + float(np.mean(attention))
        gains.append(step["seconds"] / even)
    return gains


def show(plan: Plan, results: Sequence[dict[str, Any]], title: str) -> None:
    """Prints the tables, relative to plain packing or else to the first way."""
    console = Console(width=150)
    by_name = {result["way"]: result for result in results}
    plain = by_name.get("plain")
    baseline = plain or results[0]
    table = Table(title=title)
    for column in (
        "way", "step s by batch", "tokens/s", "a GPU", "MFU", f"over {baseline['way']}",
        "imbalance", "allocated GiB", "device GiB",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "way" else "right")
    for result in results:
        steps = result["steps"]
        seconds = [step["seconds"] for step in steps]
        # A way that was interrupted has fewer steps.
        ratios = [b["seconds"] / s for b, s in zip(baseline["steps"], seconds, strict=False)]
        speed = plan.ranks * plan.tokens_per_rank * len(seconds) / sum(seconds)
        table.add_row(
            result["way"],
            " ".join(f"{s:.2f}" for s in seconds),
            f"{speed:,.0f}",
            f"{speed / plan.n_devices(result['way']):,.0f}",
            f"{np.mean([step['mfu'] for step in steps]):.1%}",
            f"{np.mean(ratios):.3f}x",
            f"{np.mean([step['imbalance'] for step in steps]):.3f}",
            f"{max((m.get('allocated_gib', 0) for m in result['memory']), default=0):.1f}",
            f"{max((m.get('device_gib', 0) for m in result['memory']), default=0):.1f}",
        )
    console.print(table)
    for result in results:
        # Attention nodes, which run all of it with a pool, are not traced.
        traces = [trace for trace in result["traces"] if sum(trace["attention_seconds"])]
        if traces:
            console.print(
                f"{result['way']}, attention's kernels in traced steps, max over mean: "
                + " ".join(f"{trace['imbalance']:.3f}" for trace in traces)
            )
    if plain is not None:
        gains = headroom(plain)
        console.print(
            f"headroom by batch: {' '.join(f'{g:.2f}' for g in gains)}; mean {np.mean(gains):.3f}x"
        )


def main(
    layers: Annotated[int, typer.Option(help="Of the Llama-3-8B shape.")] = 8,
    tokens_per_rank: Annotated[int, typer.Option(help="Also the longest document.")] = 128 * 1024,
    ranks: Annotated[int, typer.Option(help="GPUs.")] = 4,
    batches: Annotated[int, typer.Option(min=1, help="Measured; seeds from 0.")] = 6,
    warm_ups: Annotated[int, typer.Option(min=0)] = 1,
    ways: Annotated[str, typer.Option(help=f"With commas: {', '.join(methods.METHODS)}.")] = (
        "plain,repacked,context-parallel,disaggregated"
    ),
    lengths: Annotated[
        str, typer.Option(help=f"pretrain, prolong, or {ONE_DOCUMENT}: one over all ranks.")
    ] = "pretrain",
    stretch: Annotated[
        int, typer.Option(min=1, help="Documents are that many times as long as drawn.")
    ] = 1,
    eps: Annotated[float, typer.Option(help="Tolerance of the plan.")] = 0.03,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    tiny: Annotated[bool, typer.Option(help="A tiny model, to try the program.")] = False,
    compiled: Annotated[bool, typer.Option(help="Compile parts of the layers.")] = True,
    vocabulary: Annotated[
        int, typer.Option(help="Few words: the output head takes no time.")
    ] = ModelShape.vocabulary,
    pool_nodes: Annotated[
        int, typer.Option(help="Attention nodes on further GPUs, for the way 'pool'.")
    ] = 0,
    trace: Annotated[str, typer.Option(help="Ways to run once more under the profiler.")] = "",
    trace_batches: Annotated[int, typer.Option(min=1, help="Batches of which that is done.")] = 1,
    cut_documents: Annotated[
        bool | None,
        typer.Option(
            help="DistCA's ways: a document may begin in one nano-batch and go on in the other; "
            f"default: with {ONE_DOCUMENT}."
        ),
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(min=1, help="Device memory that PyTorch may hold; default: all of it."),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Training steps with core attention spread in several ways."""
    model = ModelShape(layers=layers, vocabulary=vocabulary)
    if tiny:
        model = ModelShape.tiny(layers, device)
    plan = Plan(
        model=model,
        tokens_per_rank=tokens_per_rank,
        ranks=ranks,
        seeds=tuple(range(batches)),
        warm_ups=warm_ups,
        ways=tuple(ways.split(",")),
        distribution=lengths,
        stretch=stretch,
        tolerance=eps,
        device=device,
        compiled=compiled,
        traced=tuple(trace.split(",")),
        traced_batches=trace_batches,
        pool_nodes=pool_nodes,
        memory_gib=memory_gib,
        cuts_documents=lengths == ONE_DOCUMENT if cut_documents is None else cut_documents,
    )
    try:
        plan.require_runnable()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    results = measure(plan)
    if json_path is not None:
        json_path.write_text(json.dumps({"plan": asdict(plan), "ways": results}, indent=1) + "\n")
    if not results:
        raise SystemExit("no step was measured; what went wrong is above")
    show(plan, results, f"{device_name(torch.device(device))}, {_name_of(plan)}")


def _name_of(plan: Plan) -> str:
    nodes = f" + {plan.pool_nodes}" if plan.pool_nodes else ""
    return f"{plan.ranks}{nodes} devices, {plan.model.layers} layers, {plan.tokens_per_rank} tokens"


if __name__ == "__main__":
    typer.run(main)
