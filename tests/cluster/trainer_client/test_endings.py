"""Scripts of an attached model that end without a word: other ranks learn of a death, and of which
rank, and go on after a clean end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.cluster.trainer_client.ending_rank import SHAPE
from tests.support.cluster import Cluster, cluster, home

SECONDS = 15.0
"""A rank without a sign of life is dead after 7 s, on a quiet machine."""


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("endings"), 1, node_shape=SHAPE) as running:
        yield running


@pytest.mark.parametrize(
    ("ending", "placement", "said"),
    [
        ("exit", "pool", "rank 1 failed: SystemExit: 1"),
        ("quit", "in-place", "rank 1 failed: SystemExit: 3"),
        ("process", "in-place", "rank 1 failed: ValueError: a mistake"),
        ("collective", "in-place", "no sign of life from rank 1"),
    ],
)
def test_a_death_ends_other_ranks_soon_and_is_named(
    tmp_path: Path, one_node: Cluster, ending: str, placement: str, said: str
) -> None:
    codes, outputs, ended_at = run(tmp_path, one_node, ending, placement)
    assert codes[0] != 0
    assert codes[1] != 0
    assert said in outputs[0], outputs[0][-3000:]
    began_at = float(outputs[1].split("ends at ")[1].split()[0])
    assert ended_at - began_at < SECONDS


def test_other_ranks_go_on_after_an_exit_that_was_caught(tmp_path: Path, one_node: Cluster) -> None:
    codes, outputs, _ = run(tmp_path, one_node, "exit caught", "in-place")
    assert codes == [0, 0], "\n".join(outputs)[-5000:]


def run(
    folder: Path, running: Cluster, ending: str, placement: str
) -> tuple[list[int], list[str], float]:
    """Two ranks, to their ends: exit codes, outputs, and when rank 0 had ended."""
    environment = {
        **home(folder, SHAPE),
        "STORE": f"file://{folder}/store",
        "WORLD_SIZE": "2",
        "DISTCA_CONTROL_PLANE": running.address,
        "DISTCA_PLACEMENT": placement,
        "DISTCA_JOB": folder.name,
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.trainer_client.ending_rank", ending],
            cwd=ROOT,
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks[:1]]
        ended_at = time.time()
        outputs.append(ranks[1].communicate(timeout=60)[0])
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], outputs, ended_at
