"""What fault tolerance costs while nothing fails: step times of this tree against another one.

    git worktree add /tmp/before 5562f95
    python -m benchmarks.fault_tolerance --baseline /tmp/before

Both trees run a cluster each (control plane, two nodes, two ranks that share documents) side by
side, and take turns of a few steps, so that whatever else the machine does hits both. While one
works the other waits. Each round gives one ratio; the median and its spread are reported, for wall
time and for the CPU time of all processes, which a busy machine disturbs less.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
SIDE = Path(__file__).with_name("fault_tolerance_side.py")
WARM_UP_STEPS = 10
RESAMPLES = 2000


@dataclass(frozen=True)
class Turn:
    """A few steps of one side, together."""

    wall_seconds: float
    cpu_seconds: float


class Side:
    """A checkout's cluster in a process of its own."""

    def __init__(self, tree: Path, rows: int) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, str(SIDE), str(rows)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._answer() != "ready":
            raise RuntimeError(f"the cluster of {tree} did not start")

    def run(self, steps: int) -> Turn:
        """Runs steps and returns what they took."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{steps}\n")
        self._popen.stdin.flush()
        return Turn(**json.loads(self._answer()))

    def close(self) -> None:
        """Ends the cluster."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.wait(60)

    def _answer(self) -> str:
        assert self._popen.stdout is not None
        return self._popen.stdout.readline().strip()


@dataclass(frozen=True)
class Ratio:
    """This tree's time over the baseline's.

    Attributes:
        median: over rounds.
        low, high: 95% of the medians of rounds drawn anew lie between them (bootstrap).
        seconds, baseline_seconds: medians of a step.
    """

    median: float
    low: float
    high: float
    seconds: float
    baseline_seconds: float

    @classmethod
    def of(cls, ours: list[float], baseline: list[float], steps: int) -> Ratio:
        ratios = [a / b for a, b in zip(ours, baseline, strict=True)]
        rng = random.Random(0)
        medians = sorted(
            statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
        )
        return cls(
            median=statistics.median(ratios),
            low=medians[int(0.025 * RESAMPLES)],
            high=medians[int(0.975 * RESAMPLES)],
            seconds=statistics.median(ours) / steps,
            baseline_seconds=statistics.median(baseline) / steps,
        )


def measure(baseline: Path, rounds: int, steps: int, rows: int) -> dict[str, Ratio]:
    """Lets both trees take turns; by kind of time, the ratio."""
    sides = [Side(tree, rows) for tree in (ROOT, baseline)]
    turns: list[list[Turn]] = [[], []]
    try:
        for side in sides:
            side.run(WARM_UP_STEPS)
        for number in range(rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                turns[which].append(sides[which].run(steps))
    finally:
        for side in sides:
            side.close()
    ours, theirs = turns
    return {
        name: Ratio.of(
            [getattr(turn, name) for turn in ours], [getattr(turn, name) for turn in theirs], steps
        )
        for name in ("wall_seconds", "cpu_seconds")
    }


def main(
    baseline: Annotated[Path, typer.Option(help="Another checkout of this project.")],
    rounds: Annotated[int, typer.Option(help="Turns of each tree.")] = 40,
    steps: Annotated[int, typer.Option(help="Steps of a turn.")] = 4,
    rows: Annotated[
        int,
        typer.Option(
            help="Tokens of a nano-batch, two of which are a rank's step; as in the demo."
        ),
    ] = 2048,
) -> None:
    """Compares step times of this tree with those of another one."""
    table = Table(title=f"{rounds} rounds of {steps} steps; 2 ranks with 2 x {rows:,} tokens each")
    for column in ("", "this tree, ms a step", "baseline, ms a step", "ratio", "95% interval"):
        table.add_column(column, justify="right")
    for name, ratio in measure(baseline, rounds, steps, rows).items():
        table.add_row(
            name.removesuffix("_seconds"),
            f"{ratio.seconds * 1000:.1f}",
            f"{ratio.baseline_seconds * 1000:.1f}",
            f"{ratio.median:.3f}",
            f"{ratio.low:.3f} to {ratio.high:.3f}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
