"""Ranks of a job in processes of their own, for tests on GPUs: ranks of one process would share the
thread on which autograd runs a GPU's backward pass, and could not wait for each other there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from core_attention.manifest import RankManifest
from tests.support.loops import PingPong
from tests.support.preloaded import run_forked
from tests.support.team import Layer, Layers, Rows, computed_rows, random_rows
from trainer_client import Session, SessionOptions

Steps = Sequence[Sequence[RankManifest]]


def run_ranks(
    folder: Path,
    options: Mapping[str, Any],
    layers: Sequence[Layer],
    steps: Steps,
    devices: Sequence[str],
) -> list[dict[tuple[int, int, int], Rows]]:
    """Runs ``steps``, each the manifests of all ranks, and returns the rows of each step by (rank,
    nano-batch, layer)."""
    run_forked(_run_rank, (folder, options, layers, steps, devices), len(devices))
    found = [
        torch.load(folder / f"found-{rank}.pt", weights_only=False) for rank in range(len(devices))
    ]
    return [
        {key: rows for of_rank in found for key, rows in of_rank[step].items()}
        for step in range(len(steps))
    ]


def _run_rank(
    rank: int,
    folder: Path,
    given: Mapping[str, Any],
    layers: Sequence[Layer],
    steps: Steps,
    devices: Sequence[str],
) -> None:
    device = torch.device(devices[rank])
    options = SessionOptions(**given, rank=rank, n_ranks=len(devices), device=devices[rank])
    model = PingPong(Layers(layers, checkpointed=False), takes_no_rows=True)
    found = []
    with Session.open(options) as session:
        for step, manifests in enumerate(steps):
            session.submit(RankManifest(step, rank, manifests[rank].nano_batches))
        for step, manifests in enumerate(steps):
            generator = torch.Generator().manual_seed(1000 * step + rank)
            batches = [
                [
                    random_rows(
                        options.shape, manifests[rank].tokens(nano), generator, kind, device
                    )
                    for kind in layers
                ]
                for nano in range(options.n_nano_batches)
            ]
            with session.step(step):
                outputs = model([{"layers": rows} for rows in batches])
                torch.autograd.backward(
                    [o for nano in outputs for o in nano],
                    [rows["do"] for nano in batches for rows in nano],
                )
            found.append(
                {
                    (rank, nano, layer): {
                        name: tensor.cpu()
                        for name, tensor in computed_rows(rows, outputs[nano][layer]).items()
                    }
                    for nano, of_layers in enumerate(batches)
                    for layer, rows in enumerate(of_layers)
                }
            )
    torch.save(found, folder / f"found-{rank}.pt")
