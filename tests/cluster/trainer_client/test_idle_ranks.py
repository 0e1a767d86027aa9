"""A rank without rows in a step, under DistributedDataParallel and FSDP2: its collectives run as
ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.cluster import NODE_SHAPE, Cluster, keep_profile

DEADLINE_SECONDS = 150


@pytest.mark.timeout(DEADLINE_SECONDS + 20)
def test_ranks_without_rows_train_experts_and_two_towers(
    pool_of_four: Cluster, tmp_path: Path
) -> None:
    keep_profile(tmp_path, NODE_SHAPE)
    script = str(ROOT / "tests" / "cluster" / "trainer_client" / "idle_rank_runs.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*launch, script, pool_of_four.address, str(tmp_path)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert run.returncode == 0, run.stderr[:6000]
