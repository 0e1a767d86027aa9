"""Loops of users on two GPUs, without any barrier on the host: each ends, loses no server, and has
the gradients of local attention. With ``DISTCA_LOOPS_PARALLEL`` combinations at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.cluster.gpu_loops.matrix import Combination, combinations
from tests.cluster.gpu_loops.rank import N_RANKS
from tests.cluster.gpu_loops.run import Outcome, run

PARALLEL = int(os.environ.get("DISTCA_LOOPS_PARALLEL", "8"))

on_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < N_RANKS, reason=f"needs {N_RANKS} CUDA devices"
)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[Combination, Outcome]:
    """All that are asked for, since they run side by side."""
    given = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = [each.params["combination"] for each in given if each and "combination" in each.params]
    folder = tmp_path_factory.mktemp("gpu-loops")
    found = run(chosen, folder, device="cuda", parallel=PARALLEL)
    return {outcome.combination: outcome for outcome in found}


@pytest.mark.gpu
@on_gpus
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("combination", combinations(), ids=lambda each: each.name)
def test_a_loop_ends_and_trains_as_with_local_attention(
    outcomes: Mapping[Combination, Outcome], combination: Combination
) -> None:
    assert not outcomes[combination].fault, outcomes[combination].fault


@pytest.mark.timeout(400)
def test_the_matrix_runs_without_gpus(tmp_path: Path) -> None:
    chosen = [
        Combination("metric-in-forward-hook", "fsdp", "mixed", 2),
        Combination("accumulation", "own", "in-place", 1),
    ]
    found = list(run(chosen, tmp_path, device="cpu", parallel=2))
    assert {outcome.combination: outcome.fault for outcome in found} == dict.fromkeys(chosen, "")
