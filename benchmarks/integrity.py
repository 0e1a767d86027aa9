"""What checks cost: the time of a tick with checks of results, checksums and audits, on the CPU.

A control plane, one attention node and one trainer run as real processes. One session for each
variant takes turns, step by step, so that all see the same machine.

    python -m benchmarks.integrity --json integrity.json
"""

from __future__ import annotations

import json
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.tick_path import (
    LAYERS,
    SHAPE,
    WARM_UP_STEPS,
    WORKLOADS,
    Workload,
    run_step,
    start_services,
)
from distca.local.supervisor import Supervisor
from trainer_client import Placement, Session, SessionOptions

VARIANTS: dict[str, dict[str, Any]] = {
    "no checks": {"check_results": False},
    "results checked (default)": {},
    "and checksums": {"checksums": True},
    "and 1% of tasks audited": {"checksums": True, "audit_rate": 0.01},
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """One variant on one workload.

    Attributes:
        workload, variant: names.
        tick_seconds: median, sending and waiting, forward and backward averaged.
        overhead: median over steps of how much longer the variant's step took than the step
            without checks beside it, as a share of it.
    """

    workload: str
    variant: str
    tick_seconds: float
    overhead: float


def measure(
    sessions: dict[str, Session], workload: Workload, first: int, steps: int
) -> list[Result]:
    """Runs one workload, the variants in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    for step in range(first, first + steps + WARM_UP_STEPS):
        for name, session in sessions.items():
            report = run_step(session, step, workload)
            if step >= first + WARM_UP_STEPS:
                ticks = report.send_seconds + report.wait_seconds
                seconds[name].append(ticks / (2 * LAYERS))
    plain = seconds["no checks"]
    return [
        Result(
            workload=workload.name,
            variant=name,
            tick_seconds=statistics.median(mine),
            overhead=statistics.median(a / b - 1 for a, b in zip(mine, plain, strict=True)),
        )
        for name, mine in seconds.items()
    ]


def main(
    steps: Annotated[int, typer.Option(help="Measured steps of each workload.")] = 40,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the results to this file.")
    ] = None,
) -> None:
    """Measures what checks cost on this machine."""
    torch.set_num_threads(1)
    results: list[Result] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Supervisor() as supervisor,
        ExitStack() as stack,
    ):
        address = start_services(supervisor, Path(folder))
        sessions = {
            name: stack.enter_context(
                Session.open(
                    SessionOptions(
                        control_plane=address,
                        job=f"integrity-{index}",
                        rank=0,
                        n_ranks=1,
                        n_layers=LAYERS,
                        n_nano_batches=1,
                        shape=SHAPE,
                        placement=Placement.POOL,
                        data_host="127.0.0.1",
                        one_host=True,
                        **options,
                    )
                )
            )
            for index, (name, options) in enumerate(VARIANTS.items())
        }
        for index, workload in enumerate(WORKLOADS):
            results += measure(sessions, workload, index * (steps + WARM_UP_STEPS), steps)
    show(results)
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(result) for result in results], indent=2))


def show(results: list[Result]) -> None:
    """Prints the table."""
    table = Table(title="What checks cost, one trainer and one attention node on this host")
    for column in ("documents", "checks", "ms a tick", "overhead"):
        table.add_column(column, justify="right" if column in ("ms a tick", "overhead") else "left")
    for result in results:
        table.add_row(
            result.workload,
            result.variant,
            f"{result.tick_seconds * 1e3:.2f}",
            f"{result.overhead:+.1%}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
