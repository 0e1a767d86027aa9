"""The CPU kernel passes the conformance suite, with tiles of any size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from core_attention.arrays import exclusive_cumsum
from core_attention.kernels import cpu_tiles
from core_attention.kernels.cpu import CpuKernel
from core_attention.kernels.cpu_tiles import Tile, tiles
from core_attention.kernels.protocol import Kernel, TaskBatch
from core_attention.profiling import random_parts
from core_attention.score_rule import ScoreRule
from core_attention.shape import AttentionShape
from tests.unit.core_attention.kernel_conformance import SHAPE, KernelConformance, Task, whole


class TestCpuKernel(KernelConformance):
    dtypes = ("float32", "float16", "bfloat16")

    @pytest.fixture
    def kernel(self) -> Kernel:
        return CpuKernel()

    @pytest.mark.parametrize("scores", [2**10, 2**14, 2**17])
    def test_tiles_of_any_size_give_the_same_results(
        self, kernel: Kernel, monkeypatch: pytest.MonkeyPatch, scores: int
    ) -> None:
        monkeypatch.setattr(cpu_tiles, "MAX_TILE_SCORES", scores)
        lengths = [3, 400, 17, 64, 65]
        tasks = [Task(1, 120, 400), *whole(lengths)[2:], Task(0, 1, 3)]
        for rule in (ScoreRule(), ScoreRule(window=50, softcap=2.0)):
            self.run_and_check(kernel, torch.device("cpu"), SHAPE, lengths, tasks, rule)


@pytest.mark.parametrize("kv", [300, 5000, 100_000])
def test_a_tile_stays_within_its_bound(kv: int) -> None:
    begin, end = np.array([0]), np.array([min(kv, 600)])
    batch = TaskBatch(begin, end, begin, np.array([kv]), begin)
    num_heads, num_heads_kv = 16, 4
    covered = np.zeros((int(end[0]), num_heads), dtype=np.int64)
    for tile in tiles(batch, num_heads, num_heads_kv):
        assert isinstance(tile.q_rows, slice)
        rows = tile.q_rows.stop - tile.q_rows.start
        heads = tile.heads.stop - tile.heads.start
        bound = cpu_tiles.MAX_TILE_SCORES
        if heads == num_heads // num_heads_kv:
            bound = max(bound, cpu_tiles.MIN_BLOCK_ROWS * heads * kv)
        assert rows * heads * tile.k_lengths[0] <= bound
        covered[tile.q_rows, tile.heads] += 1
    assert (covered == 1).all()


def test_calls_in_inference_mode_leave_nothing_that_later_ones_cannot_use() -> None:
    shape = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=16, head_dim_v=16, dtype="float32")
    lengths = [(1, 1), (9, 9), (3, 10), (100, 130)]
    forward, backward = random_parts(shape, lengths, torch.device("cpu"))
    rule = ScoreRule(window=50, softcap=2.0)
    kernel = CpuKernel()
    with torch.inference_mode():
        kernel.forward([forward], 0.25, rule)
    found = forward.o.clone()
    kernel.forward([forward], 0.25, rule)
    kernel.backward([backward], 0.25, rule)
    assert torch.equal(forward.o, found)


def test_gradients_of_keys_are_added_alike_one_by_one_and_all_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=16, head_dim_v=16, dtype="float32")
    lengths = [(1, 1), (9, 9), (8, 8), (3, 10), (5, 5), (64, 64)]
    forward, backward = random_parts(shape, lengths, torch.device("cpu"))
    CpuKernel().forward([forward], 0.25)
    keys = np.array([n_keys for _, n_keys in lengths])
    tasks = replace(backward.tasks, dk_begin=exclusive_cumsum(keys))
    assert all(tile.own_keys is not None for tile in _of_several_tasks(tasks))
    before = torch.randn(int(keys.sum()), 2, 16, generator=torch.Generator().manual_seed(0))
    sums = []
    for _ in range(2):
        part = replace(backward, tasks=tasks, dk=before.clone(), dv=before.clone())
        CpuKernel().backward([part], 0.25)
        sums += [part.dk, part.dv]
        monkeypatch.setattr(cpu_tiles, "_own_keys", lambda begin, length: None)
    assert torch.equal(sums[0], sums[2])
    assert torch.equal(sums[1], sums[3])


def test_tasks_that_share_keys_are_added_one_by_one() -> None:
    def own_keys(dk_begin: list[int]) -> list[bool]:
        begin, end = np.array([0, 4, 8]), np.array([4, 8, 12])
        batch = TaskBatch(
            begin, end, np.array([0, 0, 20]), np.array([4, 8, 24]), np.array(dk_begin)
        )
        return [tile.own_keys is not None for tile in _of_several_tasks(batch)]

    assert own_keys([0, 0, 20]) == [False]
    assert own_keys([24, 4, 0]) == [True]
    assert own_keys([24, 4, 1]) == [False]


def _of_several_tasks(batch: TaskBatch) -> list[Tile]:
    several = [tile for tile in tiles(batch, 4, 2) if tile.n_tasks > 1]
    assert several
    return several
