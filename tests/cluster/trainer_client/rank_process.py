"""A rank of a job as a process of its own, for tests on GPUs: ranks of one process would share the
thread on which autograd runs a GPU's backward pass, and could not wait for each other there.

It is given a file of the arguments of ``SessionOptions``, the layers and its manifests, and writes
one of the rows of each step, as ``tests.support.team`` has them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from core_attention.manifest import RankManifest
from tests.support import preloaded
from tests.support.loops import PingPong
from tests.support.team import Layer, Layers, Rows, computed_rows, random_rows
from trainer_client import Session, SessionOptions


def run_ranks(
    folder: Path,
    options: Mapping[str, Any],
    layers: Sequence[Layer],
    steps: Sequence[Sequence[RankManifest]],
    devices: Sequence[str],
    *,
    timeout_seconds: float,
) -> list[dict[tuple[int, int, int], Rows]]:
    """Runs ``steps``, each the manifests of all ranks, and returns the rows of each step by (rank,
    nano-batch, layer)."""
    processes = []
    for rank, device in enumerate(devices):
        given = {
            "options": {**options, "rank": rank, "n_ranks": len(devices), "device": device},
            "layers": list(layers),
            "manifests": [manifests[rank] for manifests in steps],
        }
        torch.save(given, folder / f"given-{rank}.pt")
        files = [str(folder / f"given-{rank}.pt"), str(folder / f"found-{rank}.pt")]
        program = f"from {__name__} import main; main()"
        processes.append(preloaded.start(program, *files, log=folder / f"{rank}.log"))
    try:
        codes = [process.wait(timeout_seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(codes), [(folder / f"{rank}.log").read_text() for rank in range(len(devices))]
    found = [
        torch.load(folder / f"found-{rank}.pt", weights_only=False) for rank in range(len(devices))
    ]
    return [
        {key: rows for of_rank in found for key, rows in of_rank[step].items()}
        for step in range(len(steps))
    ]


def main() -> None:
    given_file, found_file = sys.argv[1:]
    given = torch.load(given_file, weights_only=False)
    options, layers = SessionOptions(**given["options"]), given["layers"]
    device = torch.device(options.device)
    model = PingPong(Layers(layers, checkpointed=False), takes_no_rows=True)
    found = []
    with Session.open(options) as session:
        for step, manifest in enumerate(given["manifests"]):
            session.submit(RankManifest(step, manifest.rank, manifest.nano_batches))
        for step, manifest in enumerate(given["manifests"]):
            generator = torch.Generator().manual_seed(1000 * step + options.rank)
            batches = [
                [
                    random_rows(options.shape, manifest.tokens(nano), generator, kind, device)
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
                    (options.rank, nano, layer): {
                        name: tensor.cpu()
                        for name, tensor in computed_rows(rows, outputs[nano][layer]).items()
                    }
                    for nano, of_layers in enumerate(batches)
                    for layer, rows in enumerate(of_layers)
                }
            )
    torch.save(found, found_file)
