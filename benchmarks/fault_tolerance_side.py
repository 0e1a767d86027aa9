"""One side of ``benchmarks.fault_tolerance``: a cluster of one checkout that trains when told to.

Run as a file with the rows of a nano-batch as argument and PYTHONPATH set to the checkout, whose
tests start the cluster. Reads numbers of steps from standard input, one a line; answers each with a
JSON object: wall seconds of the steps and CPU seconds of all processes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch
from torch import nn

from core_attention.manifest import RankManifest, Segment
from core_attention.shape import AttentionShape
from tests.cluster import cluster
from tests.team import Team
from trainer_client import PingPong, Session, core_attention

SHAPE = AttentionShape(num_heads=8, num_heads_kv=2, head_dim=32, head_dim_v=32, dtype="float32")
HIDDEN = SHAPE.num_heads * SHAPE.head_dim
N_RANKS, N_LAYERS, N_NANO_BATCHES = 2, 4, 2
SHARED = 0.75
"""Part of a rank's rows that belong to a document of both: the case in which ranks keep inputs."""

STEPS_AHEAD = 3


class Layer(nn.Module):
    """A transformer layer without norms: projections, core attention, a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        kv = SHAPE.num_heads_kv * SHAPE.head_dim
        self.q, self.k, self.v = (nn.Linear(HIDDEN, size) for size in (HIDDEN, kv, kv))
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            projection(x).view(x.shape[0], -1, SHAPE.head_dim)
            for projection in (self.q, self.k, self.v)
        )
        x = x + self.out(core_attention(q, k, v).flatten(1))
        changed: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return changed


class Model(nn.Module):
    """Layers one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(N_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Rank(threading.Thread):
    """One rank, in a thread of its own."""

    def __init__(self, session: Session, rows: int) -> None:
        super().__init__(daemon=True)
        self._session = session
        self._rows = rows
        self._rank = session.options.rank
        torch.manual_seed(self._rank)
        model = Model()
        self._model = PingPong(model)
        self._parameters = list(model.parameters())
        self._batches = [{"x": torch.randn(rows, HIDDEN)} for _ in range(N_NANO_BATCHES)]
        self._submitted = self._done = 0
        self._wanted = threading.Semaphore(0)
        self.finished = threading.Semaphore(0)

    def steps(self, count: int) -> None:
        """Has the rank run ``count`` steps."""
        for _ in range(count):
            self._wanted.release()

    def run(self) -> None:
        while True:
            self._wanted.acquire()
            while self._submitted <= self._done + STEPS_AHEAD:
                self._session.submit(self._manifest(self._submitted))
                self._submitted += 1
            with self._session.step(self._done):
                loss = torch.stack(self._model(self._batches)).sum()
                loss.backward()
            for parameter in self._parameters:
                parameter.grad = None
            self._done += 1
            self.finished.release()

    def _manifest(self, step: int) -> RankManifest:
        shared, own = 10, 20 + self._rank
        span = int(SHARED * self._rows)
        nano_batches = tuple(
            (
                Segment(shared + nano, N_RANKS * span, self._rank * span, span),
                Segment(own + 2 * nano, self._rows - span, 0, self._rows - span),
            )
            for nano in range(N_NANO_BATCHES)
        )
        return RankManifest(step, self._rank, nano_batches)


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Of all processes together."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="fault-tolerance-"))
    with (
        cluster(folder, 2, lease_seconds=15.0, node_shape=SHAPE) as running,
        Team(
            running, N_RANKS, SHAPE, n_layers=N_LAYERS, n_nano_batches=N_NANO_BATCHES,
            placement="pool", planner="greedy",
        ) as team,
    ):  # fmt: skip
        processes = [psutil.Process(), *(psutil.Process(p.popen.pid) for p in running.processes)]
        ranks = [Rank(session, int(sys.argv[1])) for session in team.sessions]
        for rank in ranks:
            rank.start()
        print("ready", flush=True)
        for line in sys.stdin:
            count = int(line)
            began, cpu_began = time.perf_counter(), cpu_seconds(processes)
            for rank in ranks:
                rank.steps(count)
            for rank in ranks:
                for _ in range(count):
                    assert rank.finished.acquire(timeout=300), "a step takes for ever"
            answer = {
                "wall_seconds": time.perf_counter() - began,
                "cpu_seconds": cpu_seconds(processes) - cpu_began,
            }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
