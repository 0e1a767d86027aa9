"""Loops around an attached model, in processes that torchrun starts, as users have them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.cluster import NODE_SHAPE, Cluster, cluster, home, torchrun
from tests.support.programs import ran

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("attach"), 2) as running:
        yield running


@pytest.mark.parametrize(
    ("placement", "n_ranks", "head_groups"),
    [("in-place", 2, 1), ("mixed", 2, 2), ("in-place", 4, 1), ("pool", 2, 2)],
)
def test_loops_train_as_with_local_attention(
    tmp_path: Path, two_nodes: Cluster, placement: str, n_ranks: int, head_groups: int
) -> None:
    nodes = [process.popen.pid for process in two_nodes.processes if "node" in process.name]
    finished = run_loops(
        tmp_path,
        n_ranks,
        DISTCA_CONTROL_PLANE=two_nodes.address,
        DISTCA_PLACEMENT=placement,
        HEAD_GROUPS=str(head_groups),
        **({"TURNS": "2"} if (placement, n_ranks) in (("in-place", 2), ("pool", 2)) else {}),
        # A node ends for good: the last run has it.
        NODES=" ".join(map(str, nodes[:1])) if placement == "pool" else "",
    )
    assert finished.returncode == 0, finished.stdout[-1500:] + finished.stderr[-4000:]


@pytest.mark.parametrize("placement", ["in-place", "pool"])
def test_ranks_number_steps_at_home(tmp_path: Path, two_nodes: Cluster, placement: str) -> None:
    finished = run_loops(
        tmp_path,
        2,
        "stopped_control_plane",
        "one_rank_at_home",
        DISTCA_CONTROL_PLANE=two_nodes.address,
        DISTCA_PLACEMENT=placement,
        CONTROL_PLANE=str(two_nodes.control_plane.popen.pid),
    )
    assert finished.returncode == 0, finished.stdout[-1500:] + finished.stderr[-4000:]


def run_loops(
    folder: Path, n_ranks: int, *loops: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs :mod:`tests.cluster.trainer_client.attach_runs`."""
    shapes = [replace(NODE_SHAPE, dtype=dtype) for dtype in ("float32", "bfloat16")]
    return ran(
        *torchrun(n_ranks, "-m", "tests.cluster.trainer_client.attach_runs", *loops),
        env={**home(folder, *shapes, *(shape.share(2) for shape in shapes)), **environment},
        timeout=380,
    )
