"""A trainer that dies: the job ends for all, servers let go of what it held, and it can go on from
its checkpoint."""

from __future__ import annotations

import random
import re
import time
import urllib.request
from pathlib import Path

import pytest

from distca.apps.report.step_log import StepLog
from distca.run_folder import RunFolder
from tests.cluster.chaos.processes import Job, JobSettings
from tests.cluster.chaos.scenario import LOSS_TOLERANCE, Disturbance, References

LEASE_SECONDS = 15.0
SETTINGS = JobSettings(steps=40, n_nodes=2, more=("--checkpoint-every=10",))
END_SECONDS = LEASE_SECONDS + 15.0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped"])
def test_a_rank_is_lost(tmp_path: Path, references: References, stopped: bool) -> None:
    expected = references.of(SETTINGS)
    with Job(tmp_path, SETTINGS) as job:
        disturbance = Disturbance(job, random.Random(1))
        disturbance.wait_for_step(15)
        assert all(connections(job, node.name) > 0 for node in job.nodes)
        lost_at = time.monotonic()
        if stopped:
            disturbance.stop("trainer-1")
        else:
            disturbance.kill("trainer-1")
        assert job.trainers[0].popen.wait(END_SECONDS) != 0
        while any(connections(job, node.name) or held_bytes(job, node.name) for node in job.nodes):
            assert time.monotonic() - lost_at < END_SECONDS, "servers keep what the rank held"
            time.sleep(0.1)
        print(f"\nservers had let go of everything after {time.monotonic() - lost_at:.1f} s")
        job.trainers[1].kill()
        (tmp_path / "rendezvous").unlink(missing_ok=True)
        for rank in range(2):
            job.start_trainer(rank, "--resume")
        disturbance.finish()
        steps = StepLog(RunFolder(job.run_folder).step_log).read()
        for record, loss in zip(steps, expected.values, strict=True):
            assert abs(record.loss - loss) <= LOSS_TOLERANCE * loss
    assert not job.left_behind()


def connections(job: Job, node: str) -> float:
    return metric(job, node, "distca_data_plane_connections")


def held_bytes(job: Job, node: str) -> float:
    return metric(job, node, "distca_data_plane_buffer_pool_bytes", 'state="in_use"')


def metric(job: Job, node: str, name: str, label: str = "") -> float:
    """The sum of a metric's samples that carry ``label``."""
    url = f"http://{job.addresses(node)['metrics']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    values = re.findall(rf"^{name}(?:{{[^}}]*{label}[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert values, f"{node} has no metric {name}"
    return sum(map(float, values))
