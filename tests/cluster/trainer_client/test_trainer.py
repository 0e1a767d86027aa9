"""The Trainer of transformers and TRL's SFTTrainer train with DistCA as they do with local
attention."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests import ROOT
from tests.support.cluster import NODE_SHAPE, Cluster, keep_profile

N_RANKS = 2
DEADLINE_SECONDS = 280
TOLERANCES = {
    # float32 through two layers, on the same weights: a few hundred roundings of 6e-8.
    "gradients": 2e-5,
    # Three steps of AdamW in which such gradients are divided by their own size.
    "log": 2e-4,
}
BFLOAT16_TOLERANCES = {
    # Q, K, V, O and their gradients are rounded to 8 bits (4e-3) by kernels that sum differently.
    "gradients": 6e-2,
    "log": 3e-2,
}


@pytest.fixture(scope="module")
def runs(pool_of_four: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks have seen, by run."""
    folder = tmp_path_factory.mktemp("trainer")
    for dtype in ("float32", "bfloat16"):
        keep_profile(folder, dataclasses.replace(NODE_SHAPE, dtype=dtype))
    script = str(ROOT / "tests" / "cluster" / "trainer_client" / "trainer_runs.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*launch, f"--nproc-per-node={N_RANKS}", script, pool_of_four.address, str(folder)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(N_RANKS)]


@pytest.mark.timeout(DEADLINE_SECONDS + 20)
@pytest.mark.parametrize(
    ("name", "placement", "n_steps"),
    [
        # With accumulation of 2, three steps of the optimiser are six of the session.
        ("plain", "in-place", 6),
        ("plain", "pool", 6),
        ("packing", "pool", 3),
        ("padding-free", "in-place", 3),
        ("lora", "pool", 3),
        ("bfloat16", "in-place", 3),
    ],
)
def test_trains_as_with_local_attention(
    runs: list[dict[str, Any]], name: str, placement: str, n_steps: int
) -> None:
    tolerances = BFLOAT16_TOLERANCES if name == "bfloat16" else TOLERANCES
    for rank in runs:
        local, served = rank[name]["local"], rank[name][placement]
        # Numbers are left out where a rank was too late for a step, as on a busy machine.
        assert served["steps"] >= n_steps
        assert served["gradients"].keys() == local["gradients"].keys() != set()
        for parameter, gradient in local["gradients"].items():
            expected = torch.tensor(gradient)
            found = torch.tensor(served["gradients"][parameter])
            difference = (found - expected).abs().max() / expected.abs().max()
            assert difference < tolerances["gradients"], parameter
        assert len(local["log"]) >= n_steps // 2
        for mine, theirs in zip(served["log"], local["log"], strict=True):
            assert mine == pytest.approx(theirs, rel=tolerances["log"])


@pytest.mark.timeout(DEADLINE_SECONDS + 20)
def test_the_trainers_own_log_has_the_balance(runs: list[dict[str, Any]]) -> None:
    first, other = (rank["plain"]["in-place"]["scalars"] for rank in runs)
    assert not any(other), "one rank logs"
    assert len(first) == 3
    for scalars in first:
        assert scalars["distca/tokens_per_second"] > 0
        assert 0 < scalars["distca/mfu"] < 1
    shown = first[-1]
    assert shown["distca/step_seconds"] >= shown["distca/wait_seconds"] >= 0
    assert shown["distca/home_imbalance"] >= 1
    assert shown["distca/imbalance"] >= 1
    assert "distca/saved_seconds" in shown


@pytest.mark.timeout(DEADLINE_SECONDS + 20)
def test_resumes_from_a_checkpoint(runs: list[dict[str, Any]]) -> None:
    whole, resumed = (runs[0]["plain"][each]["log"] for each in ("in-place", "resumed"))
    steps = [entry for entry in whole if "loss" in entry]
    again = [entry for entry in resumed if "loss" in entry]
    assert again[-1] == pytest.approx(steps[-1], rel=TOLERANCES["log"])
