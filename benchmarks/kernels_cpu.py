"""Speed of the CPU kernel against PyTorch's attention, and accuracy of its cost profile.

``speed`` runs whole documents and CA-tasks through ``CpuKernel`` and, document by document, through
``scaled_dot_product_attention`` (its flash kernel), forward and backward. PyTorch has no call for a
task from the middle of a document, so mixed tasks have no such figure.

``profile`` measures a cost profile and compares its predictions with measured fused batches of
random tasks.

Figures are the best of several alternating runs: a busy machine only ever makes them worse.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from core_attention.arrays import exclusive_cumsum
from core_attention.ca_task import Phase, causal_qk_pairs
from core_attention.kernels.cpu import CpuKernel
from core_attention.kernels.protocol import BackwardPart, ForwardPart, TaskBatch
from core_attention.profiling import QUICK_GRIDS, device_name, measure_profile, random_parts
from core_attention.shape import AttentionShape

CPU = torch.device("cpu")
app = typer.Typer(add_completion=False, help=__doc__)

Heads = Annotated[int, typer.Option(help="Query heads.")]
HeadsKv = Annotated[int, typer.Option(help="Key and value heads.")]
HeadDim = Annotated[int, typer.Option(help="Head dim of Q, K and V.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed runs; the best or median counts.")]
JsonPath = Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")]


@dataclass(frozen=True)
class Speed:
    """One line of the speed table.

    Attributes:
        workload: what ran.
        phase: forward or backward.
        kernel_gflops: 1e9 operations per second of the CPU kernel.
        sdpa_gflops: the same of PyTorch's attention; None where it has no such call.
    """

    workload: str
    phase: str
    kernel_gflops: float
    sdpa_gflops: float | None

    @property
    def ratio(self) -> float | None:
        """Kernel over PyTorch: above 1, the kernel is faster."""
        return self.kernel_gflops / self.sdpa_gflops if self.sdpa_gflops else None


@dataclass(frozen=True)
class Prediction:
    """One random batch: predicted and measured seconds."""

    phase: str
    n_tasks: int
    predicted_seconds: float
    measured_seconds: float

    @property
    def relative_error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted_seconds / self.measured_seconds - 1


@app.command()
def speed(
    num_heads: Heads = 8,
    num_heads_kv: HeadsKv = 2,
    head_dim: HeadDim = 64,
    dtype: Dtype = "float32",
    repeats: Repeats = 3,
    long_document: Annotated[bool, typer.Option(help="Include the document of 16K.")] = True,
    json_path: JsonPath = None,
) -> None:
    """GFLOP/s of the CPU kernel and of PyTorch's attention."""
    shape = _shape(num_heads, num_heads_kv, head_dim, dtype)
    rng = np.random.default_rng(0)
    whole = {"1 document of 4K": [4096]}
    if long_document:
        whole["1 document of 16K"] = [16384]
    whole["16 documents of 1K"] = [1024] * 16
    whole["500 documents of 1 to 64"] = [int(n) for n in rng.integers(1, 65, 500)]
    lines = []
    for name, lengths in whole.items():
        lines += _compare_documents(name, lengths, shape, repeats)
    lines += _mixed_tasks(shape, repeats, rng)
    _show_speed(lines, shape)
    _write(json_path, shape, [asdict(line) for line in lines])


@app.command()
def profile(
    num_heads: Heads = 8,
    num_heads_kv: HeadsKv = 2,
    head_dim: HeadDim = 64,
    dtype: Dtype = "float32",
    repeats: Repeats = 3,
    batches: Annotated[int, typer.Option(min=1, help="Random batches.")] = 8,
    budget_seconds: Annotated[float, typer.Option(help="For the profile.")] = QUICK_GRIDS[
        "cpu"
    ].budget_seconds,
    json_path: JsonPath = None,
) -> None:
    """Predicted against measured seconds over random fused batches."""
    shape = _shape(num_heads, num_heads_kv, head_dim, dtype)
    kernel = CpuKernel()
    cost = measure_profile(
        kernel,
        shape,
        CPU,
        QUICK_GRIDS["cpu"].q_tokens,
        QUICK_GRIDS["cpu"].kv_tokens,
        budget_seconds=budget_seconds,
    )
    rng = np.random.default_rng(1)
    lines = []
    for _ in range(batches):
        lengths = _random_tasks(rng, 16)
        q, kv = np.array(lengths).T
        forward, backward = random_parts(shape, lengths, CPU)
        for phase, call in _calls(kernel, forward, backward, head_dim).items():
            measured = statistics.median(_times([call], repeats)[0])
            predicted = float(cost.seconds(q, kv, phase).sum())
            lines.append(Prediction(str(phase), len(lengths), predicted, measured))
    _show_predictions(lines, shape)
    _write(json_path, shape, [asdict(line) for line in lines])


def _shape(num_heads: int, num_heads_kv: int, head_dim: int, dtype: str) -> AttentionShape:
    return AttentionShape(
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=dtype,
    )


def _compare_documents(
    name: str, lengths: Sequence[int], shape: AttentionShape, repeats: int
) -> list[Speed]:
    """Whole documents, each a task and each an SDPA call."""
    forward, backward = _whole_documents(shape, lengths)
    kernel_calls = _calls(CpuKernel(), forward, backward, shape.head_dim)
    sdpa_calls = _sdpa_calls(forward, lengths)
    length = np.array(lengths, dtype=np.int64)
    pairs = int(causal_qk_pairs(np.zeros_like(length), length).sum())
    lines = []
    for phase in Phase:
        kernel_times, sdpa_times = _times([kernel_calls[phase], sdpa_calls[phase]], repeats)
        flops = shape.qk_flops(pairs, backward=phase is Phase.BACKWARD)
        lines.append(
            Speed(name, str(phase), flops / min(kernel_times) / 1e9, flops / min(sdpa_times) / 1e9)
        )
    return lines


def _mixed_tasks(shape: AttentionShape, repeats: int, rng: np.random.Generator) -> list[Speed]:
    """Tasks of 1 to 1024 queries with up to 2048 keys, in one call."""
    lengths = _random_tasks(rng, 40)
    q, kv = np.array(lengths).T
    pairs = int(causal_qk_pairs(kv - q, kv).sum())
    forward, backward = random_parts(shape, lengths, CPU)
    lines = []
    for phase, call in _calls(CpuKernel(), forward, backward, shape.head_dim).items():
        flops = shape.qk_flops(pairs, backward=phase is Phase.BACKWARD)
        best = min(_times([call], repeats)[0])
        lines.append(Speed("40 mixed tasks", str(phase), flops / best / 1e9, None))
    return lines


def _random_tasks(rng: np.random.Generator, n_tasks: int) -> list[tuple[int, int]]:
    """(queries, keys), keys log-uniform in 16 to 2048, queries up to 1024 of them."""
    keys = np.exp(rng.uniform(np.log(16), np.log(2048), n_tasks)).astype(int)
    queries = np.ceil(np.minimum(keys, 1024) * rng.uniform(0, 1, n_tasks)).astype(int)
    return list(zip(queries.tolist(), keys.tolist(), strict=True))


def _whole_documents(
    shape: AttentionShape, lengths: Sequence[int]
) -> tuple[ForwardPart, BackwardPart]:
    """Packed documents, each with keys of its own."""
    length = np.array(lengths, dtype=np.int64)
    begin = exclusive_cumsum(length)
    tasks = TaskBatch(begin, begin + length, begin, begin + length, begin)
    one, back = random_parts(shape, [(int(length.sum()), int(length.sum()))], CPU)
    return (
        ForwardPart(one.q, one.k, one.v, one.o, one.lse, tasks),
        BackwardPart(
            back.q,
            back.k,
            back.v,
            back.do,
            back.lse,
            back.delta,
            back.dq,
            back.dk,
            back.dv,
            tasks,
        ),
    )


def _calls(
    kernel: CpuKernel, forward: ForwardPart, backward: BackwardPart, head_dim: int
) -> dict[Phase, Callable[[], object]]:
    scale = head_dim**-0.5
    return {
        Phase.FORWARD: lambda: kernel.forward([forward], scale),
        Phase.BACKWARD: lambda: kernel.backward([backward], scale),
    }


def _sdpa_calls(part: ForwardPart, lengths: Sequence[int]) -> dict[Phase, Callable[[], object]]:
    """One SDPA call per document; backward through autograd, all documents in one call."""
    documents = [
        [x.transpose(0, 1)[None].detach().requires_grad_() for x in rows]
        for rows in zip(
            *(torch.split(x, list(lengths)) for x in (part.q, part.k, part.v)), strict=True
        )
    ]

    def run() -> list[torch.Tensor]:
        return [
            scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            for q, k, v in documents
        ]

    def forward() -> list[torch.Tensor]:
        with torch.no_grad():
            return run()

    outputs = run()
    gradients = [torch.randn_like(o) for o in outputs]
    inputs = [x for document in documents for x in document]
    return {
        Phase.FORWARD: forward,
        Phase.BACKWARD: lambda: torch.autograd.grad(outputs, inputs, gradients, retain_graph=True),
    }


def _times(calls: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Seconds of each call, ``repeats`` times in turns after a warm-up."""
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 1):
        for call, seconds in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            if repeat:
                seconds.append(time.perf_counter() - begin)
    return times


def _title(shape: AttentionShape) -> str:
    heads = f"{shape.num_heads} heads, {shape.num_heads_kv} kv heads, head dim {shape.head_dim}"
    return f"{device_name(CPU)}: {heads}, {shape.dtype}"


def _show_speed(lines: Sequence[Speed], shape: AttentionShape) -> None:
    table = Table(title=_title(shape))
    for column in ("workload", "phase"):
        table.add_column(column)
    for column in ("kernel GFLOP/s", "SDPA GFLOP/s", "kernel / SDPA"):
        table.add_column(column, justify="right")
    for line in lines:
        sdpa = "-" if line.sdpa_gflops is None else f"{line.sdpa_gflops:.0f}"
        ratio = "-" if line.ratio is None else f"{line.ratio:.2f}"
        table.add_row(line.workload, line.phase, f"{line.kernel_gflops:.0f}", sdpa, ratio)
    Console().print(table)


def _show_predictions(lines: Sequence[Prediction], shape: AttentionShape) -> None:
    table = Table(title=f"Cost profile on {_title(shape)}")
    for column in ("phase", "batches", "median error", "median |error|", "worst"):
        table.add_column(column, justify="right")
    for phase in Phase:
        errors = [line.relative_error for line in lines if line.phase == phase]
        table.add_row(
            phase,
            str(len(errors)),
            f"{statistics.median(errors):+.1%}",
            f"{statistics.median(map(abs, errors)):.1%}",
            f"{max(errors, key=abs):+.1%}",
        )
    Console().print(table)


def _write(path: Path | None, shape: AttentionShape, lines: Sequence[dict[str, object]]) -> None:
    if path is not None:
        report = {"device": device_name(CPU), "shape": asdict(shape), "results": list(lines)}
        path.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    app()
