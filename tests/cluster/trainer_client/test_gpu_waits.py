"""What is exposed of core attention on a GPU, as the device's own clock tells it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core_attention.ca_task import Phase
from tests.cluster.trainer_client.test_gpu_parity import ON_GPU, SHAPE
from tests.service.trainer_client.test_integrity import metric
from tests.service.trainer_client.test_parity import spanning
from tests.support.cluster import cluster
from tests.support.team import Team

pytestmark = ON_GPU

DEVICE = torch.device("cuda:0")
N_LAYERS, N_NANO_BATCHES = 2, 2

SLOW_SECONDS = 0.1
SLOW_SERVER = f"""
import time
from attention_node.executor import Executor
run_batch = Executor._run_batch
def slow(*arguments):
    time.sleep({SLOW_SECONDS})
    return run_batch(*arguments)
Executor._run_batch = slow
"""


def exposed(folder: Path, prelude: str) -> tuple[float, float, float]:
    """Seconds that were exposed in a step of two ranks, of it by the metrics, and of the step."""
    with (
        cluster(folder, 0, device=str(DEVICE), node_shape=SHAPE) as servers,
        Team(
            servers,
            2,
            SHAPE,
            n_layers=N_LAYERS,
            n_nano_batches=N_NANO_BATCHES,
            placement="pool",
            device=str(DEVICE),
            tick_timeout_seconds=120.0,
        ) as team,
    ):
        servers.start_node("node-0", prelude=prelude)
        team.check(spanning(2, 1500))  # connects and compiles
        before = sum(
            metric(team, "communication_seconds_total", phase=phase, visibility="exposed")
            for phase in Phase
        )
        reports = [running.report for running in team.check(spanning(2, 1500), seed=1).running]
        after = sum(
            metric(team, "communication_seconds_total", phase=phase, visibility="exposed")
            for phase in Phase
        )
        assert metric(team, "tick_seconds_count", phase="backward") == 2 * 2 * N_LAYERS * 2
        assert all(report is not None for report in reports)
        told = [report.exposed_seconds for report in reports if report is not None]
        assert None not in told
        steps = [report.step_seconds for report in reports if report is not None]
        return sum(each or 0.0 for each in told), after - before, max(steps)


def test_a_slow_server_is_seen_in_the_waits_of_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "fast").mkdir()
    (tmp_path / "slow").mkdir()
    fast, fast_counted, _ = exposed(tmp_path / "fast", "")
    slow, slow_counted, step_seconds = exposed(tmp_path / "slow", SLOW_SERVER)
    assert fast == pytest.approx(fast_counted)
    assert slow == pytest.approx(slow_counted)
    # Each rank waits for at least one call of each layer and phase; nothing else is computed.
    calls = N_LAYERS * 2
    assert slow > fast + 2 * calls * SLOW_SECONDS / 2
    assert slow / 2 <= step_seconds
