"""The rehearsal launches whatever serving does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from attention_node.rehearsal import (
    HERE,
    LOCAL_RANK,
    rehearse,
    rehearse_tick,
    run_small_step,
    small_plan,
)
from attention_node.tick_route import ASSEMBLED, TickRoute, derive_tick_route
from core_attention.ca_task import Phase
from core_attention.kernels.cpu import CpuKernel
from core_attention.kernels.gpu_launches import Launch, LaunchCache
from core_attention.kernels.select import select_kernel
from core_attention.manifest import Manifest
from core_attention.plan import Plan
from core_attention.shape import AttentionShape
from tests.support.planning_cases import stream_manifest
from tests.support.random_planner import random_tasks
from tests.unit.attention_node.cases import SHAPE

CPU = torch.device("cpu")
LLAMA = AttentionShape(num_heads=32, num_heads_kv=8, head_dim=128, head_dim_v=128, dtype="bfloat16")


def routes(phase: Phase) -> list[TickRoute]:
    plan = small_plan()
    return [
        derive_tick_route(plan, HERE, nano_batch, phase, LOCAL_RANK)
        for nano_batch in range(plan.manifest.n_nano_batches)
    ]


def launches(phase: Phase) -> list[Launch]:
    cache = LaunchCache(CPU, gaps=True)
    parts = [part for route in routes(phase) for part in route.parts]
    return [launch for part in parts for launch in cache.launches(part.tasks, phase)]


@pytest.mark.parametrize("phase", list(Phase))
def test_it_has_all_that_tasks_can_differ_in(phase: Phase) -> None:
    parts = [part for route in routes(phase) for part in route.parts]
    assert {part.q_source for part in parts} == {0, 1}
    assert {part.k_source == ASSEMBLED for part in parts} == {True, False}
    assert any(launch.written is None for launch in launches(phase))
    assert any(launch.written is not None for launch in launches(phase))
    if phase is Phase.BACKWARD:
        assert {launch.q.index is None for launch in launches(phase)} == {True, False}
        assert {launch.k.index is None for launch in launches(phase)} == {True, False}
        sums = [terms for route in routes(phase) for terms in route.dk_sums.values()]
        assert {len(terms) > 1 for terms in sums} == {True, False}


def test_it_runs_through_a_kernel() -> None:
    run_small_step(CpuKernel(), SHAPE, CPU)


def test_it_does_not_depend_on_the_default_dtype() -> None:
    """A trainer may have set it to build its model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        run_small_step(CpuKernel(), SHAPE, CPU)
    finally:
        torch.set_default_dtype(before)


def kernels_of(action: Callable[[], None]) -> set[str]:
    """Names of the kernels that ``action`` launches, and what Triton loads for it."""
    triton = pytest.importorskip("triton")
    loaded: list[str] = []

    def note(*, repr: str, **_: Any) -> None:  # Triton's name for it
        loaded.append(f"triton: {repr}")

    triton.knobs.runtime.jit_post_compile_hook = note
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            action()
            torch.cuda.synchronize()
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    names = {event.name for event in found.events()}
    return {*loaded, *(n for n in names if not n.startswith(("Mem", "cuda", "Activity")))}


def random_plan(seed: int) -> Plan:
    """Two ranks; documents whole or spanning both."""
    rng = np.random.default_rng(seed)
    lengths = rng.choice([1, 7, 64, 300, 1024, 2500], 8).tolist()
    manifest: Manifest = stream_manifest(lengths, 2, span=bool(seed % 2))
    tables = {phase: random_tasks(manifest, 2, rng) for phase in Phase}
    return replace(
        small_plan(),
        manifest=manifest,
        forward=tables[Phase.FORWARD],
        backward=tables[Phase.BACKWARD],
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_random_plans_launch_no_kernel_that_was_not_rehearsed() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    kernel = select_kernel(device)
    kernel.warm_up(LLAMA)
    rehearsed = kernels_of(lambda: rehearse(kernel, LLAMA, device))
    assert rehearsed

    def others() -> None:
        with torch.no_grad():
            for seed in range(40):
                for phase in Phase:
                    rehearse_tick(kernel, random_plan(seed), 0, phase, LLAMA, device)

    assert kernels_of(others) - rehearsed == set()
