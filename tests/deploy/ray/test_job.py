"""``examples.ray`` on a Ray cluster of two hosts, which are raylets of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import ROOT
from tests.cluster.others.material import write_material
from tests.support.programs import ran
from tests.support.waiting import eventually

pytest.importorskip("ray", reason="needs Ray: make launchers-test")

pytestmark = pytest.mark.timeout(500)

JOB_SECONDS = 300.0
STEPS = 60

RECIPE = [
    *("--config", str(ROOT / "examples/sft/recipe.yaml"), "--max_length=64", "--use_cpu"),
    *("--bf16=False", f"--max_steps={STEPS}", "--optim=sgd", "--learning_rate=0.1"),
    *("--num_train_epochs=100", "--save_strategy=no", "--disable_tqdm=True"),
]


@pytest.fixture
def ray_cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of its jobs."""
    from ray.cluster_utils import Cluster

    environment = {
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        # Short, for the paths of sockets; what the job makes is found by the other.
        "RAY_TMPDIR": "/tmp",
        "TMPDIR": str(tmp_path),
        # Both hosts are this machine.
        "DISTCA_DATA_HOST": "127.0.0.1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        running = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
        )
        try:
            running.add_node(num_cpus=2)
            yield {**os.environ, "RAY_ADDRESS": running.address}
        finally:
            running.shutdown()


def test_a_job_trains_to_its_end_though_a_node_is_killed(
    tmp_path: Path, ray_cluster: dict[str, str]
) -> None:
    write_material(tmp_path)
    given = [f"--model={tmp_path}/model", f"--data={tmp_path}/text/train.jsonl", *RECIPE]
    job = ["--hosts=2", "--ranks=1", "--nodes=1", "--shape=4:2:16:float32", "--no-gpus"]
    command = [sys.executable, "-m", "examples.ray", *job, "--placement=pool", *given]
    log = tmp_path / "job.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, f"--output={tmp_path}/served"],
            cwd=ROOT,
            env=ray_cluster,
            stdout=output,
            stderr=output,
        ) as running,
    ):
        eventually(lambda: "'loss'" in log.read_text() or running.poll() is not None, JOB_SECONDS)
        (node,) = ran("pgrep", "--full", f"address-file={tmp_path}/.*-1-0.address").stdout.split()
        os.kill(int(node), signal.SIGKILL)
        assert running.wait(JOB_SECONDS) == 0, log.read_text()[-6000:]
    assert "it is started again" in log.read_text()
    assert not ran("pgrep", "--full", f"{tmp_path}/distca-").stdout
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    plain = [*given, f"--output={tmp_path}/plain", "--attention=sdpa"]
    ran(sys.executable, *torchrun, "-m", "examples.sft", *plain, check=True, timeout=JOB_SECONDS)
    auto: Any = AutoModelForCausalLM
    served, alone = (auto.from_pretrained(tmp_path / name) for name in ("served", "plain"))
    for mine, theirs in zip(served.parameters(), alone.parameters(), strict=True):
        # Roundings of float32 in sixty steps.
        assert torch.allclose(mine, theirs, 1e-3, 1e-4)
