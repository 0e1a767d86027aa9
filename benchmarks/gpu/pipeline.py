"""Training steps of a Llama in a pipeline, one stage on each GPU of a host, in several ways.

Every way runs the same documents, the same model and the same optimiser, in one run:

* drawn: 1F1B, documents in microbatches as they come;
* even: 1F1B, whole documents packed to nearly equal sums of squares in all microbatches, each of
  which has as many tokens as before: the strong baseline;
* idle-aware: DistCA in place under 1F1B, idle ranks take more; idle-aware-drawn: on documents as
  they come.

``NAME@SCHEDULE`` is a way under another schedule, such as ``idle-aware@same-phase`` or
``even@zero-bubble``; ``zero-bubble:N`` has at most N microbatches between both parts of their
backward. ``even`` under a way's own schedule has the memory that the schedule needs by itself.

    python -m benchmarks.gpu.pipeline --stages 4 --json out.json

Layers are recomputed but for core attention. The optimiser's learning rate is 0, so that all ways
see the same weights and their losses must agree. A way that cannot run is named and left out. What
is measured is written to ``--json`` after every step.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.gpu.end_to_end import gathered, settle, start_control_plane
from benchmarks.gpu.training.batches import Batch, CannotRun
from benchmarks.gpu.training.methods import RankSettings
from benchmarks.gpu.training.microbatches import Layout, draw_microbatches, squares, unevenness
from benchmarks.gpu.training.pipeline_rank import N_HALVES, PipelineWay, Stages
from benchmarks.gpu.training.pipeline_report import disagreements, show
from benchmarks.gpu.training.pipeline_ways import (
    DEFAULT,
    NAMES,
    ORDERS,
    layout_of,
    require_runnable,
    way_of,
)
from benchmarks.gpu.training.rank_processes import joined, launch_in_time, let_go, spawned
from benchmarks.gpu.training.stack import ModelShape
from core_attention.profiling import device_name
from distca.apps.local.supervisor import Supervisor

_POLL_SECONDS = 0.5
_STUCK_SECONDS = 45.0
"""A step that takes longer has the stacks of its threads printed; the first one also compiles."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    Attributes:
        model: sizes.
        stages: ranks of the pipeline.
        microbatches: of a step; each number is run.
        tokens: of a microbatch.
        longest: document.
        seeds: of the batches.
        warm_ups: steps before them, on the first ones.
        ways: names, see ``pipeline_ways``.
        distribution: of document lengths.
        cuts_documents: whether a document may lie in both nano-batches of a microbatch.
        tolerance: eps of DistCA's plans.
        device: ``"cuda"`` or ``"cpu"``.
        compiled: whether parts of the layers are compiled.
        deadline_seconds: of the whole run.
    """

    model: ModelShape
    stages: int
    microbatches: tuple[int, ...]
    tokens: int
    longest: int
    seeds: tuple[int, ...]
    warm_ups: int
    ways: tuple[str, ...]
    distribution: str
    cuts_documents: bool
    tolerance: float
    device: str
    compiled: bool
    deadline_seconds: float

    def batches(self, n_microbatches: int) -> list[Batch]:
        """The measured ones."""
        return [
            draw_microbatches(seed, n_microbatches, self.tokens, self.distribution, self.longest)
            for seed in self.seeds
        ]

    def cases(self) -> list[Case]:
        """All that is to be run, in this order."""
        return [
            Case(way, n, f"{n}-{at}") for n in self.microbatches for at, way in enumerate(self.ways)
        ]

    def drawn(self, case: Case) -> list[tuple[Batch, Layout]]:
        """The steps of a case, first those to warm up on."""
        way = way_of(case.way)
        laid = [(batch, layout_of(way, batch)) for batch in self.batches(case.n_microbatches)]
        warming = [laid[i % len(laid)] for i in range(self.warm_ups)]
        return warming + laid


@dataclass(frozen=True)
class Case:
    """One way with one number of microbatches.

    Attributes:
        way: its name.
        n_microbatches: of a step.
        key: of its files.
    """

    way: str
    n_microbatches: int
    key: str


class Notes:
    """What ranks tell the process that started them, in files.

    Args:
        folder: of them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, key: str, found: dict[str, Any]) -> None:
        """Keeps what is known of a case."""
        partial = self._folder / f"{key}.partial"
        partial.write_text(json.dumps(found))
        partial.replace(self._folder / f"{key}.case")

    def read(self, cases: Sequence[Case]) -> list[dict[str, Any]]:
        """What is known of each case that has begun."""
        paths = [self._folder / f"{case.key}.case" for case in cases]
        return [json.loads(path.read_text()) for path in paths if path.exists()]


def run_case(
    case: Case,
    plan: Plan,
    drawn: Sequence[tuple[Batch, Layout]],
    settings: RankSettings,
    stages: Stages,
    notes: Notes,
) -> None:
    """Measures one case; rank 0 writes what has been found after every step."""
    way, on_gpu = way_of(case.way), settings.device.type == "cuda"
    found: dict[str, Any] = {
        "way": case.way,
        "microbatches": case.n_microbatches,
        "state": "begun",
        "steps": [],
    }

    def keep() -> None:
        if settings.rank == 0:
            notes.write(case.key, found)

    keep()
    memory = torch.cuda.get_device_properties(settings.device).total_memory if on_gpu else None
    began = time.perf_counter()
    try:
        require_runnable(way, plan.stages, case.n_microbatches, plan.model, plan.tokens, memory)
        name = f"{case.way}-{case.n_microbatches}".replace("@", "-").replace(":", "-")
        running = PipelineWay(way, name, settings, stages, case.n_microbatches, drawn)
    except CannotRun as error:
        found |= {"state": "left out", "why": str(error)}
        keep()
        return
    try:
        settle(settings.device)
        found |= {
            "in_flight": running.in_flight,
            "linear_seconds": running.linear_seconds,
            "prepare_seconds": time.perf_counter() - began,
        }
        for step in range(len(drawn)):
            if on_gpu and step == plan.warm_ups:
                torch.cuda.reset_peak_memory_stats()
            result = run_step(running, step, *drawn[step], settings)
            if settings.rank == 0:
                print(_line(case, step, result), flush=True)
            if step >= plan.warm_ups:
                found["steps"].append(result)
            keep()
        found["state"] = "done"
        keep()
    finally:
        running.close()


def run_step(
    running: PipelineWay, step: int, batch: Batch, layout: Layout, settings: RankSettings
) -> dict[str, Any]:
    """One step, timed from when all ranks are ready until all are done."""
    gc.collect()
    settle(settings.device)
    # Also where a thread that holds Python's lock waits for the device, and no other one can tell.
    faulthandler.dump_traceback_later(_STUCK_SECONDS)
    try:
        began = time.perf_counter()
        norm = running.run(step)
        settle(settings.device)
        seconds = time.perf_counter() - began
    finally:
        faulthandler.cancel_dump_traceback_later()
    ranks = gathered({**asdict(running.finish(norm)), "memory": _memory(running, settings.device)})
    tokens = len(layout) * batch.tokens_per_rank
    return {
        "seed": batch.seed,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "loss": sum(rank["loss"] for rank in ranks),
        "norm": norm,
        "unevenness": unevenness(layout, batch.lengths),
        "squares": squares(layout, batch.lengths),
        "longest": int(batch.lengths.max()),
        "ranks": ranks,
        "slots": running.slots() if settings.rank == 0 else None,
    }


def _line(case: Case, step: int, result: dict[str, Any]) -> str:
    peak = [rank["memory"].get("allocated_gib", 0.0) for rank in result["ranks"]]
    return (
        f"m={case.n_microbatches} {case.way} step {step}: {result['seconds']:.3f} s, "
        f"loss {result['loss']:.5f}, gradients' norm {result['norm']:.5f}, "
        f"unevenness {result['unevenness']:.3f}"
        + (f", peak {' '.join(f'{gib:.1f}' for gib in peak)} GiB" if any(peak) else "")
    )


def _memory(running: PipelineWay, device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "buffers_gib": running.buffer_bytes / 2**30,
        "device_gib": (total - free) / 2**30,
    }


def run_rank(
    rank: int,
    plan: Plan,
    cases: Sequence[Case],
    drawn: Sequence[Sequence[tuple[Batch, Layout]]],
    folder: Path,
) -> None:
    """A rank's process: cases, one after the other."""
    launch_in_time(rank)
    on_gpu = plan.device == "cuda"
    if on_gpu:
        # Streams share 8 hardware queues by default, and what comes behind a receive of NCCL waits
        # for its sender: which waits, in turn, for a server whose stream may be in the same queue.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    else:
        torch.set_num_threads(1)
    rendezvous = folder / "rendezvous"
    with joined(rank, plan.stages, on_gpu=on_gpu, rendezvous=rendezvous) as device:
        settings = RankSettings(
            rank=rank,
            n_ranks=plan.stages,
            device=device,
            model=plan.model,
            tokens_per_rank=plan.tokens,
            longest_document=plan.longest,
            n_nano_batches=N_HALVES,
            cuts_documents=plan.cuts_documents,
            tolerance=plan.tolerance,
            compiled=plan.compiled,
            learning_rate=0.0,
            folder=folder,
        )
        stages, notes = Stages(settings), Notes(folder)
        for case, steps in zip(cases, drawn, strict=True):
            run_case(case, plan, steps, settings, stages, notes)
            let_go(device)


def measure(plan: Plan, keep: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """Starts a control plane and the ranks; returns what there is of all cases when they are over,
    a rank has failed, or the deadline has come.

    Args:
        plan: what to measure.
        keep: given the results whenever there are more.
    """
    deadline = time.monotonic() + plan.deadline_seconds
    with tempfile.TemporaryDirectory() as name, Supervisor() as supervisor:
        folder = Path(name)
        notes, cases = Notes(folder), plan.cases()
        if any(way_of(way).served for way in plan.ways):
            start_control_plane(supervisor, folder)
        drawn = [plan.drawn(case) for case in cases]
        why = "the deadline came first"
        with spawned(run_rank, (plan, cases, drawn, folder), plan.stages) as ranks:
            try:
                while time.monotonic() < deadline and not ranks.join(timeout=_POLL_SECONDS):
                    keep(notes.read(cases))
            except Exception as error:
                why = f"a rank failed: {str(error).strip().splitlines()[-1]}"
        found = notes.read(cases)
        for case in found:
            if case["state"] == "begun":
                case |= {"state": "failed", "why": why}
        return found


def main(
    stages: Annotated[int, typer.Option(min=1, help="Ranks of the pipeline, a GPU each.")] = 4,
    microbatches: Annotated[
        str, typer.Option(help="Of a step; several numbers, with commas, are run one by one.")
    ] = "4,8",
    batches: Annotated[int, typer.Option(min=1, help="Measured; seeds from 0.")] = 5,
    warm_ups: Annotated[int, typer.Option(min=0)] = 1,
    ways: Annotated[
        str,
        typer.Option(
            help=f"With commas: {', '.join(NAMES)}; also with a schedule behind, such as "
            f"idle-aware@zero-bubble ({', '.join(ORDERS)}, zero-bubble:N)."
        ),
    ] = ",".join(DEFAULT),
    layers: Annotated[int, typer.Option(help="Of the Llama-3-8B shape.")] = 8,
    tokens: Annotated[int, typer.Option(help="Of a microbatch.")] = 128 * 1024,
    longest: Annotated[
        int | None,
        typer.Option(
            help="Longer documents are cut to it; default: the tokens of a microbatch. Documents "
            "of more than half of them leave DistCA's two nano-batches unequal, unless they may be "
            "cut."
        ),
    ] = None,
    cut_documents: Annotated[
        bool, typer.Option(help="Let a document lie in both of DistCA's two nano-batches.")
    ] = False,
    lengths: Annotated[str, typer.Option(help="pretrain or prolong.")] = "pretrain",
    vocabulary: Annotated[
        int, typer.Option(help="Of the output head, on the last stage: small, so stages are equal.")
    ] = 1024,
    eps: Annotated[float, typer.Option(help="Tolerance of DistCA's plans.")] = 0.03,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    tiny: Annotated[bool, typer.Option(help="A tiny model, to try the program.")] = False,
    compiled: Annotated[bool, typer.Option(help="Compile parts of the layers.")] = True,
    verify: Annotated[
        bool,
        typer.Option(
            help="Fail unless losses agree, and gradients' norms of DistCA's ways and 1F1B's on "
            "the first batch."
        ),
    ] = False,
    deadline: Annotated[float, typer.Option(help="Seconds for everything.")] = 540.0,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Training steps in a pipeline, in several ways.

    A step of the defaults (4 stages, 8 layers) takes 6 to 18 s on H200s, building and joining 10
    to 30 s a way. So m = 4 with 5 batches of the ways drawn, even and idle-aware takes about 4
    minutes, m = 8 about 9: two calls. With --stages 2 a step takes twice as long for the
    same layers: give --layers 4. At --deadline it ends, and shows what it has.
    """
    model = ModelShape(layers=layers, vocabulary=vocabulary)
    if tiny:
        model = ModelShape.tiny(layers, device, vocabulary)
    try:
        plan = Plan(
            model=model,
            stages=stages,
            microbatches=tuple(int(n) for n in microbatches.split(",")),
            tokens=tokens,
            longest=longest or tokens,
            seeds=tuple(range(batches)),
            warm_ups=warm_ups,
            ways=tuple(ways.split(",")),
            distribution=lengths,
            cuts_documents=cut_documents,
            tolerance=eps,
            device=device,
            compiled=compiled,
            deadline_seconds=deadline,
        )
        for name in plan.ways:
            way_of(name)
        plan.batches(min(plan.microbatches))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    title = f"{stages} stages, {layers} layers, {tokens} tokens a microbatch"

    def keep(cases: list[dict[str, Any]]) -> None:
        if json_path is not None:
            written = {"title": title, "plan": asdict(plan), "cases": cases}
            partial = json_path.with_suffix(".partial")
            partial.write_text(json.dumps(written, indent=1) + "\n")
            partial.replace(json_path)

    found = measure(plan, keep)
    # Not before: this process shall take no memory of a GPU that is measured.
    title = f"{device_name(torch.device(device))}, {title}"
    keep(found)
    show(asdict(plan), found, title)
    wrong = disagreements(asdict(plan), found)
    if verify and wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    typer.run(main)
