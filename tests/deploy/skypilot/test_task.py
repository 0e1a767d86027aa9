"""``examples/skypilot/task.yaml``: SkyPilot takes it, and its commands train on two hosts."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests import ROOT
from tests.deploy.compose_project import free_port
from tests.support.programs import ran
from tests.support.waiting import eventually

sky = pytest.importorskip("sky", reason="needs SkyPilot: make launchers-test")

pytestmark = pytest.mark.timeout(500)

TASK = ROOT / "examples" / "skypilot" / "task.yaml"
JOB_SECONDS = 300.0
STEPS = 100


def test_its_commands_train_to_their_end_though_a_node_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    task = sky.Task.from_yaml(str(TASK))
    assert task.num_nodes == 2
    assert {str(each.accelerators) for each in task.resources} == {"{'H200': 8}"}
    trainer = (
        f"--module distca train --device=cpu --steps={STEPS} --verify --verify-every=20 "
        "--hidden-size=64 --layers=2 --heads=4 --kv-heads=2 --tokens-per-rank=256 "
        f"--data-host=127.0.0.1 --run-dir={tmp_path}/run"
    )
    env = {
        **os.environ,
        **task.envs,
        "PATH": f"{Path(torch.__file__).parents[4] / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HOME": str(tmp_path),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_TASK_ID": "sky-2026-01-01-00-00-00-000000_distca_1",
        "PORT": str(free_port()),
        "NODES": "1",
        "RANKS": "1",
        "SHAPE": "4:2:16:float32",
        "PLACEMENT": "pool",
        "TRAIN": trainer,
    }
    hosts = [tmp_path / str(rank) for rank in range(2)]
    started = []
    for rank, folder in enumerate(hosts):
        folder.mkdir()
        with (folder / "log").open("wb") as log:
            started.append(
                subprocess.Popen(
                    ["bash", "-c", task.run],
                    cwd=folder,
                    env={**env, "SKYPILOT_NODE_RANK": str(rank)},
                    stdout=log,
                    stderr=log,
                )
            )
    first, second = (folder / "log" for folder in hosts)
    try:
        eventually(
            lambda: "loss" in first.read_text() or any(each.poll() for each in started), JOB_SECONDS
        )
        (node,) = ran("pgrep", "--full", f"address-file={hosts[1]}/.*-1-0.address").stdout.split()
        os.kill(int(node), signal.SIGKILL)
        assert [each.wait(JOB_SECONDS) for each in started] == [0, 0], second.read_text()[-4000:]
    finally:
        for each in started:
            each.terminate()
    assert "it is started again" in second.read_text()
    assert "steps: equal to local attention" in first.read_text()
