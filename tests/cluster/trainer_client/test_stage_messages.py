"""Messages between stages: they arrive whatever the receiver does, in any order, or are named; and
those of another step are named, too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.preloaded import run_forked
from tests.support.process_groups import process_group
from trainer_client import SessionError
from trainer_client.pipelines.stage_messages import StageMessages
from trainer_client.step.lane import current_step

N_MICROBATCHES = 3


class Stage:
    """What of a ``PipelineStage`` matters here: one tensor forward, one back.

    Attributes:
        ran: what its actions had received, by kind and microbatch.
    """

    def __init__(self, index: int, n_stages: int, ranks: list[int]) -> None:
        self.stage_index, self.num_stages, self.group = index, n_stages, None
        self.stage_index_to_group_rank = dict(enumerate(ranks))
        self.has_backward = True
        self.inputs = [torch.full((4,), -1.0) for _ in range(N_MICROBATCHES)]
        self.gradients = [torch.full((4,), -1.0) for _ in range(N_MICROBATCHES)]
        self.ran: dict[tuple[str, int], float] = {}

    def get_fwd_recv_ops(self, microbatch: int) -> list[Any]:
        return self._operations(dist.irecv, self.inputs[microbatch], self.stage_index - 1)

    def get_fwd_send_ops(self, microbatch: int) -> list[Any]:
        sent = torch.full((4,), 100.0 * self.stage_index + microbatch)
        return self._operations(dist.isend, sent, self.stage_index + 1)

    def get_bwd_recv_ops(self, microbatch: int) -> list[Any]:
        if not self.has_backward:
            return []
        return self._operations(dist.irecv, self.gradients[microbatch], self.stage_index + 1)

    def get_bwd_send_ops(self, microbatch: int) -> list[Any]:
        sent = torch.full((4,), -100.0 * self.stage_index - microbatch)
        return self._operations(dist.isend, sent, self.stage_index - 1)

    def forward_one_chunk(self, microbatch: int) -> None:
        self.ran["F", microbatch] = float(self.inputs[microbatch][0])

    def backward_one_chunk(self, microbatch: int) -> None:
        self.ran["B", microbatch] = float(self.gradients[microbatch][0])

    def _operations(self, act: Any, tensor: torch.Tensor, other: int) -> list[Any]:
        if not 0 <= other < self.num_stages:
            return []
        peer = self.stage_index_to_group_rank[other]
        return [] if peer == dist.get_rank() else [dist.P2POp(act, tensor, peer)]


def run(stage: Any, kind: str, microbatch: int) -> None:
    """An action as PyTorch runs it: receive, compute, send."""
    which, compute = ("fwd", "forward") if kind == "F" else ("bwd", "backward")
    assert getattr(stage, f"get_{which}_recv_ops")(microbatch) == []
    getattr(stage, f"{compute}_one_chunk")(microbatch)
    assert getattr(stage, f"get_{which}_send_ops")(microbatch) == []


def in_rank(rank: int, folder: str) -> None:
    """All cases, since starting costs more than they do."""
    with process_group(folder, rank, 2):
        for case in (
            any_order,
            sends_end,
            two_stages_a_rank,
            outside_of_steps,
            never_sent,
            given_up,
            of_another_step,
            given_up_late,
        ):
            case(rank)


def of_two(rank: int, timeout_seconds: float = 30.0) -> tuple[Any, StageMessages]:
    stage = Stage(rank, 2, [0, 1])
    messages = StageMessages(timeout_seconds, [stage], N_MICROBATCHES, torch.device("cpu"))
    return stage, messages


def any_order(rank: int) -> None:
    """The last stage takes microbatches in an order of its own; two steps, then only forwards."""
    stage, messages = of_two(rank)
    for _ in range(2):
        with messages.step():
            if rank == 0:
                for i in (0, 1, 2):
                    run(stage, "F", i)
                for i in (2, 0, 1):
                    run(stage, "B", i)
                assert [stage.ran["B", i] for i in range(3)] == [-100.0, -101.0, -102.0]
            else:
                for i in (2, 0, 1):
                    run(stage, "F", i)
                    run(stage, "B", i)
                assert [stage.ran["F", i] for i in range(3)] == [0.0, 1.0, 2.0]
        for buffer in (*stage.inputs, *stage.gradients):
            buffer.fill_(-1.0)
    stage.has_backward = False
    with messages.step():
        for i in range(N_MICROBATCHES):
            run(stage, "F", i)
        assert stage.ran["F", 2] == (2.0 if rank else -1.0)


def sends_end(rank: int) -> None:
    """All that the first stage sends has arrived before the second one asks for any of it."""
    stage, messages = of_two(rank)
    with messages.step():
        if rank == 0:
            for i in range(N_MICROBATCHES):
                run(stage, "F", i)
            dist.barrier()
        else:
            stage.get_fwd_recv_ops(0)  # the step has begun
            deadline = time.monotonic() + 20.0
            while stage.inputs[2][0] != 2.0:
                assert time.monotonic() < deadline, "nothing came while the stage was busy"
                time.sleep(0.01)
            dist.barrier()
            for i in range(N_MICROBATCHES):
                run(stage, "F", i)
        for i in range(N_MICROBATCHES):
            if rank == 1:
                run(stage, "B", i)
        if rank == 0:
            for i in range(N_MICROBATCHES):
                run(stage, "B", i)


def two_stages_a_rank(rank: int) -> None:
    """Stages 0 and 2 on one rank, 1 and 3 on the other: messages go up and down, two at a time."""
    stages: list[Any] = [Stage(index, 4, [0, 1, 0, 1]) for index in (rank, rank + 2)]
    messages = StageMessages(30.0, stages, N_MICROBATCHES, torch.device("cpu"))
    with messages.step():
        for i in range(N_MICROBATCHES):
            for stage in stages:
                run(stage, "F", i)
                if stage.stage_index:
                    assert stage.ran["F", i] == 100.0 * (stage.stage_index - 1) + i
        for i in range(N_MICROBATCHES):
            for stage in reversed(stages):
                run(stage, "B", i)
                if stage.stage_index < 3:
                    assert stage.ran["B", i] == -100.0 * (stage.stage_index + 1) - i


def step_of(messages: StageMessages, *actions: Callable[[], Any]) -> None:
    with messages.step():
        for act in actions:
            act()


def listening() -> list[str]:
    """Threads that would keep a process from ending in order."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("distca-stage-messages")]


def never_sent(rank: int) -> None:
    """Who waits in vain says for what, and who has not run its step is told so."""
    stage, messages = of_two(rank, timeout_seconds=1.0)
    if rank == 0:
        with pytest.raises(SessionError):
            step_of(messages, partial(stage.get_fwd_recv_ops, 0), partial(time.sleep, 2.0))
    else:
        with pytest.raises(SessionError):
            step_of(messages, partial(run, stage, "F", 0))
    assert not listening()


def given_up(rank: int) -> None:
    """Who waits for a rank that failed hears of it at once."""
    stage, messages = of_two(rank)
    began = time.monotonic()
    if rank == 0:
        with pytest.raises(ZeroDivisionError):
            step_of(messages, partial(run, stage, "F", 0), lambda: 1 / 0)
        with pytest.raises(SessionError):
            step_of(messages, partial(run, stage, "F", 0))
    else:
        with pytest.raises(SessionError):
            step_of(messages, partial(run, stage, "F", 0), partial(run, stage, "F", 1))
    # Less than anybody's deadline.
    assert time.monotonic() - began < 15.0
    assert not listening()


@contextmanager
def in_step(number: int) -> Iterator[None]:
    step: Any = SimpleNamespace(step=number)
    token = current_step.set(step)
    try:
        yield
    finally:
        current_step.reset(token)


def of_another_step(rank: int) -> None:
    """One rank has left a step out: its neighbour's tensors are of that one."""
    stage, messages = of_two(rank)
    if rank == 0:
        with in_step(1), pytest.raises(SessionError):
            step_of(messages, partial(run, stage, "F", 0), partial(run, stage, "B", 0))
    else:
        with (
            in_step(2),
            pytest.raises(SessionError),
        ):
            step_of(messages, partial(run, stage, "F", 0))
    assert not listening()


def given_up_late(rank: int) -> None:
    """Who had all that it needed of a rank that failed hears of it in its next step."""
    stage, messages = of_two(rank)
    actions = [
        partial(run, stage, kind, microbatch)
        for kind in "FB"
        for microbatch in range(N_MICROBATCHES)
    ]
    if rank == 0:
        with in_step(1), pytest.raises(ZeroDivisionError):
            step_of(messages, *actions, lambda: 1 / 0)
    else:
        with in_step(1):
            step_of(messages, *actions)
        with in_step(2), pytest.raises(SessionError):
            step_of(messages, *actions)
    assert not listening()


def outside_of_steps(rank: int) -> None:
    """Stages send and receive as PyTorch has them do."""
    stage, messages = of_two(rank)
    assert len(stage.get_fwd_send_ops(0)) == (1 if rank == 0 else 0)
    assert len(stage.get_fwd_recv_ops(0)) == rank
    n_threads = threading.active_count()
    stage.forward_one_chunk(0)
    assert threading.active_count() == n_threads
    assert not messages._arriving
    assert not messages._listeners


def test_messages_of_two_ranks(tmp_path: Path) -> None:
    run_forked(in_rank, (str(tmp_path),), 2)
