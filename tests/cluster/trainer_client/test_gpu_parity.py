"""Gradient parity on a GPU: kernels, streams, cuda_ipc between processes, all placements."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core_attention.ca_task import Phase
from core_attention.manifest import RankManifest
from core_attention.shape import AttentionShape
from data_plane.device_memory import DeviceBlock
from tests.service.trainer_client.test_parity import CASES, spanning
from tests.service.trainer_client.test_recovery import kill_at, recoveries
from tests.support.cluster import Cluster, cluster
from tests.support.team import Team

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(400),
]
pytestmark = ON_GPU

SHAPE = AttentionShape(num_heads=8, num_heads_kv=2, head_dim=64, head_dim_v=64, dtype="bfloat16")
DEVICE = "cuda:0"


@pytest.fixture(scope="module")
def gpu_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("gpu-cluster")
    with cluster(folder, 2, device=DEVICE, node_shape=SHAPE) as running:
        yield running


@pytest.fixture(scope="module", params=["pool", "in-place", "mixed"])
def team(request: pytest.FixtureRequest, gpu_pool: Cluster) -> Iterator[Team]:
    with Team(
        gpu_pool,
        2,
        SHAPE,
        n_layers=2,
        placement=request.param,
        device=DEVICE,
        tick_timeout_seconds=120.0,
    ) as running:
        yield running


@pytest.mark.parametrize("case", CASES)
def test_every_placement_matches_the_reference(team: Team, case: str) -> None:
    team.check(CASES[case])


def test_long_documents_match_the_reference(team: Team) -> None:
    team.check(spanning(2, 3001))
    team.check([RankManifest.from_lengths(0, rank, [[2500, 40], [1500]]) for rank in range(2)])


def test_equal_steps_give_equal_bits_forward(team: Team) -> None:
    manifests = spanning(2, 1500)
    runs = [team.run(manifests) for _ in range(3)]
    for key, rows in runs[0].rows.items():
        for other in runs[1:]:
            assert rows["o"].equal(other.rows[key]["o"]), f"o of {key} differs"


def test_a_steady_state_allocates_no_device_memory(gpu_pool: Cluster) -> None:
    """Neither message buffers, nor the caching allocator that everything else comes from.

    A pool rather makes another block than have the host wait for a kernel that still reads one. How
    many are in use at once is a matter of timing, so the largest number may be reached late; but
    there is one, of at most twice the messages of a tick, and then nothing is allocated any more.
    """
    manifests = spanning(2, 1500)
    with Team(
        gpu_pool, 2, SHAPE, n_layers=2, placement="pool", planner="steady", device=DEVICE
    ) as team:

        def allocations() -> list[int]:
            pools = [session._pool.stats().allocations for session in team.sessions]
            return [*pools, torch.cuda.memory_stats(DEVICE)["num_device_alloc"]]

        team.run(manifests)
        most = [2 * each for each in allocations()[:-1]]
        history = []
        for _ in range(24):
            team.run(manifests)
            history.append(allocations())
        assert all(now <= limit for now, limit in zip(history[-1], most, strict=False)), history
        assert any(history[first] == history[first + 4] for first in range(len(history) - 4)), (
            history
        )


def test_a_closed_session_leaves_no_message_buffers_on_the_device(gpu_pool: Cluster) -> None:
    before = blocks_of_the_driver()
    with Team(gpu_pool, 2, SHAPE, n_layers=2, placement="mixed", device=DEVICE) as team:
        team.run(spanning(2, 1500))
        assert blocks_of_the_driver() > before
    assert blocks_of_the_driver() == before


def blocks_of_the_driver() -> int:
    """Memory of the device that this process holds for messages, in pieces."""
    gc.collect()
    return sum(isinstance(each, DeviceBlock) for each in gc.get_objects())


@pytest.mark.parametrize("phase", list(Phase))
def test_a_killed_server_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    """The ticks of the server are replayed, first on the other one and then at home."""
    with (
        cluster(tmp_path, 2, device=DEVICE, node_shape=SHAPE) as servers,
        Team(
            servers,
            2,
            SHAPE,
            n_layers=2,
            placement="pool",
            device=DEVICE,
            tick_timeout_seconds=120.0,
        ) as team,
    ):
        team.check(spanning(2, 3001))
        for step, victim in enumerate(servers.processes[1:3], start=1):
            with monkeypatch.context() as patched:
                kill_at(patched, [victim], rank=1, layer=1, phase=phase, step=step)
                assert max(recoveries(team.check(spanning(2, 3001), seed=step))) >= 1
