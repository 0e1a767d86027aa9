"""Runs the matrix: several combinations at a time, all with one control plane and its nodes.

python -m tests.cluster.gpu_loops.run --parallel 8 --out DIR          # two GPUs
python -m tests.cluster.gpu_loops.run --device cpu --only none-ddp  # by part of a name
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.rank_group import RankGroup
from control_plane.planner.planners import PLANNERS, prepare
from tests.cluster.gpu_loops.matrix import Combination, combinations
from tests.cluster.gpu_loops.rank import N_RANKS, Settings, shape_of
from tests.support.cluster import Cluster

TOKENS = {"cuda": 8192, "cpu": 384}
TOLERANCES = {"cuda": (1e-3, 5e-2), "cpu": (1e-5, 1e-4)}
"""Of losses and gradients: those of ``--verify`` in bfloat16 and float32."""

LIMIT_SECONDS = {"cuda": 180.0, "cpu": 500.0}
"""Of a combination; CPUs may be busy."""

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Outcome:
    """How a combination ended.

    Attributes:
        combination: which.
        seconds: it took.
        fault: empty if all is well.
        shown: how far it is from local attention.
    """

    combination: Combination
    seconds: float
    fault: str
    shown: str = ""


class Running:
    """A combination whose ranks run.

    Args:
        combination: which.
        cluster: serves it.
        folder: of its own.
        device: cuda or cpu.
        limit_seconds: after which it is killed.
    """

    def __init__(
        self,
        combination: Combination,
        cluster: Cluster,
        folder: Path,
        device: str,
        limit_seconds: float,
    ) -> None:
        self._combination, self._folder, self._device = combination, folder, device
        settings = Settings(
            combination=asdict(combination),
            control_plane=cluster.address,
            folder=str(folder),
            profiles=str(cluster.folder),
            device=device,
            tokens=TOKENS[device],
        )
        self._group = RankGroup(
            [sys.executable, "-m", "tests.cluster.gpu_loops.rank", json.dumps(asdict(settings))],
            N_RANKS,
            folder,
            limit_seconds=limit_seconds,
            environ={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    @property
    def outcome(self) -> Outcome | None:
        """None while it runs."""
        if not self._group.is_over:
            return None
        found = self._found()
        shown = ""
        if found:
            worst = max(found[0]["compared"], key=lambda step: step["gradient"])
            shown = f"{worst['parameter']} off by {worst['gradient']:.1e}"
        return Outcome(self._combination, self._group.seconds, self._fault(found), shown)

    def kill(self) -> None:
        self._group.kill()

    def _found(self) -> list[dict[str, Any]]:
        """Of the ranks; nothing if one has failed."""
        if any(self._group.exit_codes):
            return []
        files = [self._folder / f"rank-{rank}.json" for rank in range(N_RANKS)]
        return [json.loads(file.read_text()) for file in files]

    def _fault(self, found: list[dict[str, Any]]) -> str:
        if not found:
            return f"did not end rightly\n{self._group.tails(60)}"
        if any(rank["recoveries"] or rank["replayed_ticks"] for rank in found):
            return f"a server was lost\n{self._group.tails()}"
        if not sum(rank["sent_bytes"] for rank in found):
            return "no row travelled"
        loss, gradient = TOLERANCES[self._device]
        for step in found[0]["compared"]:
            # Written so that a NaN is a fault.
            if not (step["loss"] <= loss and step["gradient"] <= gradient):
                return f"differs from local attention: {step}"
        return ""


@contextmanager
def serving(folder: Path, device: str) -> Iterator[Cluster]:
    """A control plane whose planner is compiled, and a node on each rank's device."""
    shape = shape_of(device)
    prepare(PLANNERS["balanced"])
    cluster = Cluster(folder, device=device, node_shape=shape)
    try:
        for rank in range(N_RANKS):
            own = f"cuda:{rank}" if device == "cuda" else "cpu"
            cluster.start_node(f"node-{rank}", device=own)
        yield cluster
    finally:
        cluster.close()


def run(
    chosen: Sequence[Combination],
    folder: Path,
    *,
    device: str,
    parallel: int,
    limit_seconds: float | None = None,
) -> Iterator[Outcome]:
    """The outcomes, as they come.

    Args:
        chosen: what to run.
        folder: of logs, one for each combination; and of the servers'.
        device: cuda or cpu.
        parallel: how many run at a time.
        limit_seconds: of each; None: as LIMIT_SECONDS says.
    """
    limit_seconds = limit_seconds or LIMIT_SECONDS[device]
    waiting, running = list(chosen), list[Running]()
    servers = folder / "servers"
    servers.mkdir(parents=True, exist_ok=True)
    with serving(servers, device) as cluster:
        try:
            while waiting or running:
                while waiting and len(running) < parallel:
                    combination = waiting.pop(0)
                    own = folder / combination.name
                    running.append(Running(combination, cluster, own, device, limit_seconds))
                time.sleep(POLL_SECONDS)
                for each in list(running):
                    if (outcome := each.outcome) is not None:
                        running.remove(each)
                        yield outcome
        finally:
            for each in running:
                each.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parallel", type=int, default=8, help="combinations at a time")
    parser.add_argument("--out", type=Path, help="folder of logs; default: a new one")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="parts of names, with commas between")
    parser.add_argument("--limit-seconds", type=float, help="of each combination")
    given = parser.parse_args()
    parts = given.only.split(",")
    chosen = [each for each in combinations() if any(part in each.name for part in parts)]
    folder = given.out or Path(tempfile.mkdtemp(prefix="gpu-loops-"))
    began, bad = time.monotonic(), list[Outcome]()
    for outcome in run(
        chosen,
        folder,
        device=given.device,
        parallel=given.parallel,
        limit_seconds=given.limit_seconds,
    ):
        verdict = outcome.fault.partition("\n")[0] or f"ok, {outcome.shown}"
        print(f"{outcome.combination.name}: {outcome.seconds:.0f} s, {verdict}", flush=True)
        bad += [outcome] if outcome.fault else []
    for outcome in bad:
        print(f"== {outcome.combination.name}: {outcome.fault}")
    seconds = time.monotonic() - began
    print(f"{len(chosen) - len(bad)} of {len(chosen)} are well, {seconds:.0f} s; logs: {folder}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
