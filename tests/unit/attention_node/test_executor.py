"""The executor: fusing what is ready, in order, and surviving a kernel that fails."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from attention_node.executor import Executor, KernelCall
from attention_node.open_tick import OpenTick
from attention_node.tick_route import derive_tick_route
from core_attention.ca_task import Phase, TaskTable
from core_attention.kernels.cpu import CpuKernel
from core_attention.kernels.protocol import BackwardPart, ForwardPart
from core_attention.manifest import RankManifest
from core_attention.score_rule import PLAIN, ScoreRule
from tests.support.waiting import eventually
from tests.unit.attention_node.cases import (
    WAIT_SECONDS,
    make_documents,
    make_plan,
    make_source,
    open_tick,
)


class GatedKernel(CpuKernel):
    """The CPU kernel behind a gate: calls wait until the test lets them through."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.error: Exception | None = None

    def forward(self, parts: Sequence[ForwardPart], scale: float, rule: ScoreRule = PLAIN) -> None:
        self._pass()
        super().forward(parts, scale, rule)

    def backward(
        self, parts: Sequence[BackwardPart], scale: float, rule: ScoreRule = PLAIN
    ) -> None:
        self._pass()
        super().backward(parts, scale, rule)

    def _pass(self) -> None:
        self.entered.set()
        assert self.gate.wait(WAIT_SECONDS)
        if self.error is not None:
            raise self.error


@pytest.fixture
def kernel() -> GatedKernel:
    return GatedKernel()


@pytest.fixture
def calls() -> list[KernelCall]:
    return []


@pytest.fixture
def executor(kernel: GatedKernel, calls: list[KernelCall]) -> Iterator[Executor]:
    running = Executor(kernel, torch.device("cpu"), on_call=calls.append)
    yield running
    kernel.gate.set()
    running.close()


class StreamEvent:
    """Stands for the CUDA event after a rank's inputs."""

    def __init__(self, error: Exception | None = None) -> None:
        self.reached = threading.Event()
        self._error = error

    def synchronize(self) -> None:
        assert self.reached.wait(WAIT_SECONDS)
        if self._error is not None:
            raise self._error


def submit(
    executor: Executor,
    length: int,
    phase: Phase = Phase.FORWARD,
    written: StreamEvent | None = None,
) -> tuple[OpenTick, list[BaseException]]:
    """One document on one rank."""
    plan = make_plan(
        [RankManifest.from_lengths(0, 0, [[length]])],
        TaskTable(*np.array([[0], [0], [length], [0]])),
    )
    route = derive_tick_route(plan, 0, 0, phase, None)
    ranks, _ = make_documents(plan.manifest)
    tick = open_tick(route, phase, lambda tick: None)
    source = make_source(route, 0, ranks[0], phase, local=False)
    executor.arrive(tick, 0, replace(source, written=cast(Any, written)))
    return tick, ranks[0].failures


def test_what_became_ready_during_a_call_is_fused_into_the_next(
    executor: Executor, kernel: GatedKernel, calls: list[KernelCall]
) -> None:
    first, _ = submit(executor, 5)
    assert kernel.entered.wait(WAIT_SECONDS)
    others = [submit(executor, length)[0] for length in (7, 1, 9)]
    kernel.gate.set()
    eventually(lambda: len(calls) == 2)
    assert calls[0].ticks == (first,)
    assert calls[1].ticks == tuple(others)
    assert calls[1].tasks == 3
    assert calls[1].qk_pairs == 28 + 1 + 45
    eventually(lambda: all(tick.closed for tick in (first, *others)))
    assert all(tick.busy_seconds > 0 for tick in (first, *others))


def test_inputs_that_a_stream_still_writes_hold_up_nobody_else(
    executor: Executor, kernel: GatedKernel, calls: list[KernelCall]
) -> None:
    kernel.gate.set()
    event = StreamEvent()
    late, _ = submit(executor, 5, written=event)
    early, _ = submit(executor, 7)
    eventually(lambda: early.closed)
    assert [call.ticks for call in calls] == [(early,)]
    event.reached.set()
    eventually(lambda: late.closed)
    assert [call.ticks for call in calls] == [(early,), (late,)]


def test_inputs_whose_stream_failed_do_not_end_the_thread_that_waits(
    executor: Executor, kernel: GatedKernel
) -> None:
    kernel.gate.set()
    failed, fine = StreamEvent(RuntimeError("CUDA error")), StreamEvent()
    for event in (failed, fine):
        event.reached.set()
    ticks = [submit(executor, 5, written=event)[0] for event in (failed, fine)]
    eventually(lambda: all(tick.closed for tick in ticks))


@pytest.mark.parametrize("is_written", [False, True])
def test_a_thread_that_waits_holds_no_tensors(
    executor: Executor, kernel: GatedKernel, is_written: bool
) -> None:
    """The next rank of a tick may come a slot of a pipeline later, and until then nothing else."""
    kernel.gate.set()
    manifests = [RankManifest.from_lengths(0, rank, [[5]]) for rank in range(2)]
    plan = make_plan(manifests, TaskTable(*np.array([[0, 1], [0, 0], [5, 5], [0, 0]])))
    route = derive_tick_route(plan, 0, 0, Phase.BACKWARD, None)
    ranks, _ = make_documents(plan.manifest)
    tick = open_tick(route, Phase.BACKWARD, lambda tick: None)
    source = make_source(route, 0, ranks[0], Phase.BACKWARD, local=False)
    event = StreamEvent()
    event.reached.set()
    inputs = {name: rows.clone() for name, rows in source.inputs.items()}
    tensors = [weakref.ref(rows) for rows in inputs.values()]
    source = replace(
        source,
        inputs=inputs,
        release=lambda: None,
        written=cast(Any, event) if is_written else None,
    )
    executor.arrive(tick, 0, source)
    del inputs, source
    eventually(lambda: bool(ranks[0].replies) and all(ref() is None for ref in tensors))
    assert not tick.closed


def test_other_ranks_parts_come_before_own_ones_and_between_them(
    executor: Executor, kernel: GatedKernel, calls: list[KernelCall]
) -> None:
    manifests = [
        RankManifest.from_lengths(0, 0, [[10, 20, 30]]),
        RankManifest.from_lengths(0, 1, [[7]]),
    ]
    plan = make_plan(
        manifests,
        TaskTable(*np.array([[0, 1, 2, 3], [0] * 4, [10, 20, 30, 7], [0] * 4])),
        local_rank=0,
    )
    route = derive_tick_route(plan, 0, 0, Phase.BACKWARD, 0, own_pairs=50)
    ranks, _ = make_documents(plan.manifest)
    tick = open_tick(route, Phase.BACKWARD, lambda tick: None)
    own, other = (
        make_source(route, rank, ranks[rank], Phase.BACKWARD, local=rank == 0) for rank in range(2)
    )
    executor.arrive(tick, 0, own)
    assert kernel.entered.wait(WAIT_SECONDS)
    executor.arrive(tick, 1, other)
    kernel.gate.set()
    eventually(lambda: tick.closed)
    # While the other's rows were to come, one at a time; then all that are left.
    assert [(call.tasks, call.qk_pairs) for call in calls] == [(1, 55), (1, 28), (2, 210 + 465)]
    assert [len(rank.replies) for rank in ranks] == [1, 1]


def test_phases_do_not_share_a_call(
    executor: Executor, kernel: GatedKernel, calls: list[KernelCall]
) -> None:
    submit(executor, 5)
    assert kernel.entered.wait(WAIT_SECONDS)
    for phase in (Phase.BACKWARD, Phase.FORWARD, Phase.BACKWARD):
        submit(executor, 3, phase)
    kernel.gate.set()
    eventually(lambda: len(calls) == 3)
    assert [(call.phase, call.tasks) for call in calls] == [
        (Phase.FORWARD, 1),
        (Phase.BACKWARD, 2),
        (Phase.FORWARD, 1),
    ]


def test_a_call_with_enough_work_takes_no_more(kernel: GatedKernel) -> None:
    calls: list[KernelCall] = []
    executor = Executor(kernel, torch.device("cpu"), fuse_qk_pairs=20, on_call=calls.append)
    submit(executor, 2)
    assert kernel.entered.wait(WAIT_SECONDS)
    for _ in range(4):
        submit(executor, 5)
    kernel.gate.set()
    eventually(lambda: len(calls) == 3)
    executor.close()
    assert [call.tasks for call in calls] == [1, 2, 2]


def test_a_kernel_that_fails_ends_its_ticks_and_not_the_executor(
    executor: Executor, kernel: GatedKernel, calls: list[KernelCall]
) -> None:
    kernel.error = MemoryError("no memory for the scores")
    kernel.gate.set()
    failed, failures = submit(executor, 5)
    # It closes once its ranks have been told.
    eventually(lambda: failed.closed)
    assert isinstance(failures[0], MemoryError)
    kernel.error = None
    tick, _ = submit(executor, 5)
    eventually(lambda: tick.closed)
    assert len(calls) == 1


def test_a_tick_that_was_given_up_is_not_run(
    executor: Executor, kernel: GatedKernel, calls: list[KernelCall]
) -> None:
    submit(executor, 5)
    assert kernel.entered.wait(WAIT_SECONDS)
    tick, failures = submit(executor, 9)
    executor.give_up(tick, RuntimeError("the job was closed"))
    last, _ = submit(executor, 3)
    kernel.gate.set()
    eventually(lambda: last.closed)
    assert failures
    assert [call.qk_pairs for call in calls] == [15, 6]


def test_a_failure_outside_of_the_kernel_ends_its_tick_and_not_the_executor(
    executor: Executor, kernel: GatedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.gate.set()

    def no_memory(self: OpenTick, index: int) -> None:
        raise MemoryError("no memory for the sums")

    with monkeypatch.context() as patched:
        patched.setattr(OpenTick, "part_done", no_memory)
        failed, failures = submit(executor, 5)
        eventually(lambda: failed.closed)
    assert isinstance(failures[0], MemoryError)
    tick, _ = submit(executor, 5)
    eventually(lambda: tick.closed)
    assert tick.failure is None
