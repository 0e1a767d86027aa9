"""Training while the control plane is killed and started again, with real processes."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from core_attention.manifest import RankManifest, Segment
from tests.support.cluster import NODE_SHAPE, Cluster, cluster
from tests.support.team import Team

KILLS = 3
STEPS_BETWEEN = 3
STEP_SECONDS = 90.0

MANIFESTS = [
    RankManifest(0, 0, ((Segment(1, 90, 0, 60), Segment(2, 17, 0, 17)), (Segment(3, 40, 0, 40),))),
    RankManifest(0, 1, ((Segment(1, 90, 60, 30),), (Segment(4, 64, 0, 64),))),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("placement", ["pool", "in-place"])
def test_every_step_is_right_while_the_control_plane_comes_and_goes(
    tmp_path: Path, placement: str
) -> None:
    n_nodes = 2 if placement == "pool" else 0
    step_done = threading.Semaphore(0)
    with (
        cluster(tmp_path, n_nodes, lease_seconds=5.0) as running,
        Team(running, 2, NODE_SHAPE, n_layers=2, placement=placement) as team,
        ThreadPoolExecutor(1) as killer,
    ):
        killed = killer.submit(kill_between_steps, running, step_done)
        for seed in itertools.count():
            # A step that is under way when the control plane dies goes on afterwards.
            team.check(MANIFESTS, seed=seed)
            step_done.release()
            if killed.done():
                break
        killed.result()
        for process in running.processes:
            assert "fenced" not in process.log.read_text()


def kill_between_steps(running: Cluster, step_done: threading.Semaphore) -> None:
    for _ in range(KILLS):
        for _ in range(STEPS_BETWEEN):
            assert step_done.acquire(timeout=STEP_SECONDS)
        running.control_plane.kill()
        running.start_control_plane()
    for _ in range(STEPS_BETWEEN):
        assert step_done.acquire(timeout=STEP_SECONDS)
