"""Loops of users on two GPUs, without any barrier on the host: each ends, loses no server, and has
the gradients of local attention. With ``DISTCA_LOOPS_PARALLEL`` combinations at a time, all with
one control plane and its nodes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks.rank_group import RankGroup
from tests.cluster.gpu_loops.matrix import Combination, combinations
from tests.cluster.gpu_loops.rank import N_RANKS, Settings, shape_of
from tests.support.cluster import Cluster

PARALLEL = int(os.environ.get("DISTCA_LOOPS_PARALLEL", "8"))

TOKENS = {"cuda": 8192, "cpu": 384}

LIMIT_SECONDS = {"cuda": 180.0, "cpu": 500.0}
"""Of a combination; CPUs may be busy."""

POLL_SECONDS = 0.2


@contextmanager
def serving(folder: Path, device: str) -> Iterator[Cluster]:
    """A control plane, and a node on each rank's device."""
    cluster = Cluster(folder, device=device, node_shape=shape_of(device))
    try:
        for rank in range(N_RANKS):
            own = f"cuda:{rank}" if device == "cuda" else "cpu"
            cluster.start_node(f"node-{rank}", device=own)
        yield cluster
    finally:
        cluster.close()


def start(combination: Combination, cluster: Cluster, folder: Path, device: str) -> RankGroup:
    settings = Settings(
        combination=asdict(combination),
        control_plane=cluster.address,
        folder=str(folder),
        profiles=str(cluster.folder),
        device=device,
        tokens=TOKENS[device],
    )
    return RankGroup(
        [sys.executable, "-m", "tests.cluster.gpu_loops.rank", json.dumps(asdict(settings))],
        N_RANKS,
        folder,
        limit_seconds=LIMIT_SECONDS[device],
        environ={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def fault_of(ended: RankGroup, folder: Path) -> str:
    """Empty if all is well."""
    if any(ended.exit_codes):
        return f"did not end rightly\n{ended.tails(60)}"
    files = [folder / f"rank-{rank}.json" for rank in range(N_RANKS)]
    found = [json.loads(file.read_text()) for file in files]
    if any(rank["recoveries"] for rank in found):
        return f"a server was lost\n{ended.tails()}"
    if not sum(rank["sent_bytes"] for rank in found):
        return "no row travelled"
    first = found[0]
    # Written so that a NaN is a fault.
    is_right = all(first[each] <= first[f"{each}_tolerance"] for each in ("loss", "gradient"))
    return "" if is_right else f"differs from local attention: {first}"


def run(chosen: Sequence[Combination], folder: Path, *, device: str) -> dict[Combination, str]:
    """The fault of each, empty if all is well; logs are in folders below ``folder``."""
    waiting, running, faults = list(chosen), dict[Combination, RankGroup](), {}
    servers = folder / "servers"
    servers.mkdir(parents=True)
    with serving(servers, device) as cluster:
        try:
            while waiting or running:
                while waiting and len(running) < PARALLEL:
                    each = waiting.pop(0)
                    running[each] = start(each, cluster, folder / each.name, device)
                time.sleep(POLL_SECONDS)
                for each in [each for each, group in running.items() if group.is_over]:
                    faults[each] = fault_of(running.pop(each), folder / each.name)
        finally:
            for group in running.values():
                group.kill()
    return faults


@pytest.fixture(scope="module")
def faults(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[Combination, str]:
    """Of all that are asked for, since they run side by side."""
    given = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = [each.params["combination"] for each in given if each and "combination" in each.params]
    return run(chosen, tmp_path_factory.mktemp("gpu-loops"), device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < N_RANKS, reason=f"needs {N_RANKS} CUDA devices")
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("combination", combinations(), ids=lambda each: each.name)
def test_a_loop_ends_and_trains_as_with_local_attention(
    faults: Mapping[Combination, str], combination: Combination
) -> None:
    assert not faults[combination], faults[combination]


@pytest.mark.timeout(400)
def test_the_matrix_runs_without_gpus(tmp_path: Path) -> None:
    chosen = [
        Combination("metric-in-forward-hook", "fsdp", "mixed", 2),
        Combination("accumulation", "own", "in-place", 1),
    ]
    assert run(chosen, tmp_path / "logs", device="cpu") == dict.fromkeys(chosen, "")
