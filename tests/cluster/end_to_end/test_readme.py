"""The README's loop runs as it stands there, and trains as local attention does; on GPUs too."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from core_attention.shape import AttentionShape
from tests import ROOT
from tests.support.cluster import Cluster, cluster, home, torchrun
from tests.support.programs import ran

N_RANKS, N_STEPS = 2, 4
SHAPE = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=64, head_dim_v=64, dtype="float32")
SHAPES = {"cpu": SHAPE, "cuda": replace(SHAPE, dtype="bfloat16")}
TOLERANCES = {
    # float32 through two layers: a few hundred roundings of 6e-8.
    "cpu": (1e-6, 2e-5),
    # Those of ``--verify`` in bfloat16.
    "cuda": (1e-3, 5e-2),
}
"""Of the loss and of gradients."""

DEADLINE_SECONDS = {"cpu": 110, "cuda": 180}
DEVICES = (
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(
                torch.cuda.device_count() < N_RANKS, reason="needs two CUDA devices"
            ),
            pytest.mark.timeout(600),
        ],
    ),
)

WATCHED = """
import os, runpy, sys, torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
steps = []
def note(optimizer, *_):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    steps.append([(p.detach().clone(), p.grad.clone()) for p in parameters])
register_optimizer_step_pre_hook(note)
sys.argv, folder = sys.argv[1:-1], sys.argv[-1]
names = runpy.run_path(sys.argv[0], run_name="__main__")
kept = {"batches": list(names["loader"]), "loss": names["loss"].item(), "steps": steps}
kept |= {"config": names["config"], "documents": names["documents"]}
torch.save(kept, folder + "/rank" + os.environ["RANK"])
"""
"""Runs a script, and notes weights and gradients before each step of its optimiser."""


@pytest.fixture(scope="module", params=DEVICES)
def nodes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Cluster]]:
    """The device of the ranks and of the nodes, one for each GPU."""
    device: str = request.param
    folder = tmp_path_factory.mktemp("readme")
    with cluster(folder, 0, device=device, node_shape=SHAPES[device]) as running:
        for rank in range(N_RANKS if device == "cuda" else 1):
            running.start_node(f"node-{rank}", device=f"cuda:{rank}" if device == "cuda" else "cpu")
        yield device, running


@pytest.mark.parametrize("placement", ["in-place", "pool"])
def test_the_example_trains(tmp_path: Path, nodes: tuple[str, Cluster], placement: str) -> None:
    device, running = nodes
    (tmp_path / "train.py").write_text(example())
    (tmp_path / "watched.py").write_text(WATCHED)
    environment = {
        **home(tmp_path, SHAPES[device], device=device),
        "PYTHONPATH": python_path(),
        "DISTCA_CONTROL_PLANE": running.address,
        "DISTCA_PLACEMENT": placement,
    }
    run = ran(
        *torchrun(N_RANKS, "watched.py", "train.py", running.address, placement, str(tmp_path)),
        cwd=tmp_path,
        env=environment,
        timeout=DEADLINE_SECONDS[device],
    )
    assert run.returncode == 0, run.stderr[-4000:]
    compare_with_local_attention(tmp_path, *TOLERANCES[device])


def example() -> str:
    text = (ROOT / "README.md").read_text()
    (script,) = re.findall(r"```python\n(import .*?)```", text, re.DOTALL)
    return str(script)


def python_path() -> str:
    """The project first: the example's folder is another one."""
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


def compare_with_local_attention(
    folder: Path, loss_tolerance: float, gradient_tolerance: float
) -> None:
    """Each document alone through a model with local attention, on the weights of each step; the
    loss is the mean of each rank's."""
    ranks = [
        torch.load(folder / f"rank{rank}", weights_only=False, map_location="cpu")
        for rank in range(N_RANKS)
    ]
    watched = ranks[0]
    assert len(watched["steps"]) == N_STEPS
    auto: Any = AutoModelForCausalLM  # from_config has no annotations
    # Higher precision than the run's own bfloat16, in which a loss has steps of half a percent.
    local = auto.from_config(watched["config"], attn_implementation="sdpa", dtype=torch.float32)
    taken = 0
    for step, parameters in enumerate(watched["steps"]):
        by_rank = [split(rank["batches"][step]) for rank in ranks]
        taken += sum(map(len, by_rank))
        with torch.no_grad():
            for mine, (weights, _) in zip(local.parameters(), parameters, strict=True):
                mine.copy_(weights)
        local.zero_grad()
        loss = torch.stack([mean_loss(local, documents) for documents in by_rank]).mean()
        loss.backward()
        for (name, mine), (_, gradient) in zip(local.named_parameters(), parameters, strict=True):
            assert mine.grad is not None
            difference = (gradient - mine.grad).abs().max() / mine.grad.abs().max()
            assert difference < gradient_tolerance, (
                f"step {step}: {name} differs by {difference:.1e}"
            )
    assert taken == len(watched["documents"])
    last = sum(rank["loss"] for rank in ranks) / N_RANKS
    assert last == pytest.approx(loss.item(), rel=loss_tolerance)


def split(batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The token ids of each packed document."""
    (starts,) = (batch["position_ids"][0] == 0).nonzero(as_tuple=True)
    return list(batch["input_ids"][0].tensor_split(starts[1:]))


def mean_loss(model: Any, documents: list[torch.Tensor]) -> torch.Tensor:
    """Over all tokens of all documents that have one before them."""
    losses = []
    for document in documents:
        logits = model(input_ids=document[None]).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum"))
    return torch.stack(losses).sum() / sum(len(document) - 1 for document in documents)
