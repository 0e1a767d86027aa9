"""A job whose processes are killed and started again at once under its name, as torchrun and
schedulers do: the new ones wait for the leases of the old ones, and train."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from tests import ROOT
from tests.support.cluster import Cluster, cluster, torchrun
from tests.support.programs import ran

LEASE_SECONDS = 6.0
END_SECONDS = 120.0
"""Importing torch in several processes at once takes long on a busy machine."""

SCRIPT = ROOT / "tests" / "cluster" / "end_to_end" / "restarted_rank.py"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("restart")
    with cluster(folder, 0, lease_seconds=LEASE_SECONDS) as running:
        yield running


def environment(running: Cluster) -> dict[str, str]:
    """Of ranks, the first of which kill themselves."""
    (running.folder / "kill").touch()
    chosen = {"control_plane": running.address, "folder": str(running.folder)}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "DISTCA_TEST": json.dumps(chosen),
    }


def check_results(running: Cluster) -> None:
    """Both ranks have trained to the end, in one job, which they opened before a lease ended."""
    results = [json.loads((running.folder / f"result-{rank}.json").read_text()) for rank in (0, 1)]
    assert [result["steps"] for result in results] == [4, 4]
    assert len({result["job_id"] for result in results}) == 1
    assert max(result["opened_seconds"] for result in results) < LEASE_SECONDS


@pytest.mark.timeout(2 * END_SECONDS)
def test_torchrun_restarts_a_killed_job_with_one_try(running: Cluster) -> None:
    done = ran(
        *torchrun(2, "--max-restarts=1", str(SCRIPT)),
        env=environment(running),
        cwd=running.folder,
        timeout=END_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    check_results(running)
