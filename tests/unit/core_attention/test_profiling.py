"""Measuring profiles, with a kernel that waits instead of computing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from core_attention import profiling
from core_attention.ca_task import causal_qk_pairs
from core_attention.cost_model import CostProfile
from core_attention.errors import ProfileError
from core_attention.kernels.cpu import CpuKernel
from core_attention.kernels.protocol import BackwardPart, ForwardPart, TaskBatch
from core_attention.profiling import ProfileGrid, load_or_measure, measure_profile
from core_attention.score_rule import PLAIN, ScoreRule
from core_attention.shape import AttentionShape

CPU = torch.device("cpu")
SHAPE = AttentionShape(num_heads=2, num_heads_kv=1, head_dim=8, head_dim_v=8, dtype="float32")
PAIR_SECONDS = 1e-6


class Clock:
    """Time that passes only when the kernel works."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


class ClockKernel(CpuKernel):
    """Takes a fixed time per query-key pair, twice as much backward."""

    name = "clock"

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.tasks_seen: set[tuple[int, int, int]] = set()

    def forward(self, parts: Sequence[ForwardPart], scale: float, rule: ScoreRule = PLAIN) -> None:
        for part in parts:
            self._work(part.tasks, PAIR_SECONDS)

    def backward(
        self, parts: Sequence[BackwardPart], scale: float, rule: ScoreRule = PLAIN
    ) -> None:
        for part in parts:
            self._work(part.tasks, 2 * PAIR_SECONDS)

    def _work(self, tasks: TaskBatch, pair_seconds: float) -> None:
        kv, q = tasks.k_end - tasks.k_begin, tasks.q_end - tasks.q_begin
        self.tasks_seen |= {(len(tasks), int(q[0]), int(kv[0]))}
        self.clock.now += pair_seconds * float(causal_qk_pairs(kv - q, kv).sum())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(profiling, "time", clock)
    return clock


def pairs_of(profile: CostProfile) -> np.ndarray:
    q = profile.q_tokens[:, None]
    kv = np.maximum(profile.kv_tokens[None, :], q)
    return np.asarray(causal_qk_pairs(kv - q, kv))


@pytest.mark.parametrize("budget_seconds", [0.0, 20.0, 1e6])
def test_measured_or_extrapolated_a_constant_rate_is_found(
    clock: Clock, budget_seconds: float
) -> None:
    kernel, calls = ClockKernel(clock), []
    profile = measure_profile(
        kernel,
        SHAPE,
        CPU,
        [1, 8, 64, 512],
        [1, 32, 256, 2048],
        budget_seconds=budget_seconds,
        progress=lambda done, total: calls.append((done, total)),
    )
    np.testing.assert_allclose(profile.forward_seconds, PAIR_SECONDS * pairs_of(profile))
    np.testing.assert_allclose(profile.backward_seconds, 2 * PAIR_SECONDS * pairs_of(profile))
    assert calls == [(i, calls[-1][1]) for i in range(1, len(calls) + 1)]
    assert calls[-1][0] == calls[-1][1]
    # One cell is always measured: q 512, kv 512, 0.13 s forward and 0.26 backward, 4 runs each.
    assert clock.now <= max(budget_seconds, 1.6)
    assert (len(kernel.tasks_seen) == 1) == (budget_seconds == 0.0)
    assert (len(kernel.tasks_seen) == calls[-1][1]) == (budget_seconds == 1e6)


def test_short_tasks_are_measured_many_to_a_call(clock: Clock) -> None:
    kernel = ClockKernel(clock)
    measure_profile(kernel, SHAPE, CPU, [1, 512], [1, 512], budget_seconds=1e6)
    assert kernel.tasks_seen == {(16, 1, 1), (16, 1, 512), (1, 512, 512)}


def test_a_bad_grid_is_refused_before_anything_is_measured(clock: Clock) -> None:
    kernel = ClockKernel(clock)
    with pytest.raises(ProfileError):
        measure_profile(kernel, SHAPE, CPU, [2, 4], [1, 2], budget_seconds=1)
    assert not kernel.tasks_seen


GRID = ProfileGrid(q_tokens=(1, 16), kv_tokens=(1, 32), budget_seconds=1.0)


def test_a_profile_is_measured_once(tmp_path: Path, clock: Clock) -> None:
    first_kernel, second_kernel = ClockKernel(clock), ClockKernel(clock)
    first = load_or_measure(tmp_path, first_kernel, SHAPE, CPU, GRID)
    second = load_or_measure(tmp_path, second_kernel, SHAPE, CPU, GRID)
    assert first_kernel.tasks_seen
    assert not second_kernel.tasks_seen
    assert first.to_json() == second.to_json()
    (path,) = tmp_path.iterdir()
    assert path.name.endswith("-clock-h2-kv1-d8-dv8-float32.json")


@pytest.mark.parametrize("content", [b"{}", b"", b"\xff\0\0"])
def test_an_unusable_file_is_measured_again_with_a_warning(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    load_or_measure(tmp_path, ClockKernel(clock), SHAPE, CPU, GRID)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    kernel = ClockKernel(clock)
    load_or_measure(tmp_path, kernel, SHAPE, CPU, GRID)
    assert kernel.tasks_seen
    assert str(path) in caplog.text
    CostProfile.load(path)


def test_the_cpu_kernel_can_be_profiled() -> None:
    profile = measure_profile(CpuKernel(), SHAPE, CPU, [1, 64], [1, 256], budget_seconds=2)
    assert profile.kernel == "cpu"
    assert profile.forward_seconds[1, 1] > 0


@pytest.mark.parametrize(("seconds", "calls"), [(0.0004, 1 + 3 * 4), (0.1, 1 + 3 + 1 + 1)])
def test_short_calls_are_timed_in_a_row_and_long_ones_alone(
    clock: Clock, seconds: float, calls: int
) -> None:
    """A row of calls counts as its mean: each launch but the first is hidden by the call before."""
    launch_seconds, made = 0.0001, []

    class Device(ClockKernel):
        def synchronize(self) -> None:
            clock.now += launch_seconds

    def call() -> None:
        made.append(clock.now)
        clock.now += seconds

    measured = profiling._median_seconds(Device(clock), call, torch.device("cuda"))
    assert len(made) == calls
    in_a_row = 3 if seconds < profiling.LONG_SECONDS else 1
    assert measured == pytest.approx(seconds + launch_seconds / in_a_row)
