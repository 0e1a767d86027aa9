"""A control plane on a machine that has never run one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import psutil
import pytest

from control_plane.cold_start.planner import NOTE
from core_attention.plan import AT_HOME
from distca.contract.codec import plan_from_proto
from distca.v1 import cluster_pb2, cluster_pb2_grpc, jobs_pb2
from tests.support import service_harness
from tests.support.service_harness import client_of, job_spec, rank_manifest
from tests.support.waiting import eventually

BUSY_SECONDS = 90.0
"""Three processes start, on a machine that may have other things to do."""


def planner_state(channel: grpc.Channel) -> str:
    stub = cluster_pb2_grpc.ClusterStub(channel)
    return str(stub.DescribeCluster(cluster_pb2.DescribeClusterRequest()).planner_state)


def test_it_plans_while_the_planner_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_harness, "DEADLINE_SECONDS", BUSY_SECONDS)
    address_file = tmp_path / "address.json"
    process = psutil.Popen(
        [
            *(sys.executable, "-m", "distca", "control-plane", "--listen=127.0.0.1:0"),
            *("--metrics-listen=127.0.0.1:0", f"--address-file={address_file}"),
        ],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
        stderr=subprocess.DEVNULL,
    )
    children: list[psutil.Process] = []
    try:
        eventually(lambda: address_file.exists() or process.poll() is not None, BUSY_SECONDS)
        with client_of(json.loads(address_file.read_text())["grpc"]) as client:
            assert planner_state(client.channel) == "compiling"
            client.register("s0")
            spec = job_spec(placement=jobs_pb2.PLACEMENT_MIXED)
            (job_id, lease), (_, other) = client.open(0, spec), client.open(1, spec)
            watcher = client.watch_rank(job_id, lease)
            watcher.next("job_opened")
            client.submit(job_id, lease, rank_manifest(0, 0))
            client.submit(job_id, other, rank_manifest(0, 1))
            plan = plan_from_proto(watcher.next("step_planned").plan)
            assert planner_state(client.channel) == "compiling"
            children = process.children(recursive=True)
            watcher.cancel()
        # The latter where the process that plans takes long to start.
        assert plan.reason.endswith(NOTE) or plan.planner == AT_HOME
        assert len(children) >= 2
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    # Multiprocessing's own process sees a moment later that nobody is left.
    assert psutil.wait_procs(children, 30)[1] == []
