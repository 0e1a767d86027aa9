"""A user's training loop, for tests: two ranks on the CPU. A marker file in the folder has both of
them killed in the middle of a step; who finishes writes the step it reached.

Environment: RANK, WORLD_SIZE, DISTCA_TEST (JSON: control_plane, folder).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

from core_attention.manifest import RankManifest
from tests.support.cluster import NODE_SHAPE, on_this_host
from tests.support.loops import PingPong
from trainer_client import Placement, Session, SessionOptions, core_attention

STEPS = 4
KILLED_IN = 2


class Model(nn.Module):
    """Two layers of core attention, and a weight between them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(NODE_SHAPE.head_dim))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = core_attention(q * self.weight, k, v)
        return core_attention(rows, k, v)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    chosen = json.loads(os.environ["DISTCA_TEST"])
    rank, folder = int(os.environ["RANK"]), Path(chosen["folder"])
    options = SessionOptions(
        control_plane=chosen["control_plane"],
        job="torchrun",
        rank=rank,
        n_ranks=int(os.environ["WORLD_SIZE"]),
        n_layers=2,
        shape=NODE_SHAPE,
        placement=Placement.IN_PLACE,
        planner="random",
        **on_this_host(folder),
    )
    model = PingPong(Model())
    began = time.monotonic()
    with Session.open(options) as session:
        opened_seconds = time.monotonic() - began
        for step in range(STEPS):
            session.submit(RankManifest.from_lengths(step, rank, [[40, 24], [64]]))
        for step in range(STEPS):
            with session.step(step):
                outputs = model([rows_of(64) for _ in range(2)])
                if step == KILLED_IN and (folder / "kill").exists():
                    die_together(folder, rank)
                torch.autograd.backward([output.sum() for output in outputs])
    result = {"steps": STEPS, "job_id": session.job_id, "opened_seconds": opened_seconds}
    (folder / f"result-{rank}.json").write_text(json.dumps(result))


def rows_of(n_rows: int) -> dict[str, torch.Tensor]:
    shape = NODE_SHAPE
    return {
        "q": torch.randn(n_rows, shape.num_heads, shape.head_dim),
        "k": torch.randn(n_rows, shape.num_heads_kv, shape.head_dim),
        "v": torch.randn(n_rows, shape.num_heads_kv, shape.head_dim_v),
    }


def die_together(folder: Path, rank: int) -> None:
    """Ends this process as SIGKILL does once the other one is here too."""
    (folder / f"here-{rank}").touch()
    while not all((folder / f"here-{other}").exists() for other in (0, 1)):
        time.sleep(0.01)
    if rank == 0:
        (folder / "kill").unlink()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
