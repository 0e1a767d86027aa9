"""What a server holds of pipelines' messages: it does not grow with the microbatches of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from attention_node.machine import instructions
from attention_node.machine.server import RankRefusal, ServerMachine
from attention_node.served_job import JobDescription, ServedStep
from core_attention.ca_task import Phase, TaskTable
from core_attention.manifest import Manifest, RankManifest
from core_attention.pipelining import Pipelining
from core_attention.plan import Plan
from core_attention.schedule import Kind
from core_attention.schedule_orders import SCHEDULES
from core_attention.tick import Tick
from tests.unit.attention_node.cases import SCALE, SHAPE, make_plan

N_STAGES, ROWS, TOKENS = 4, 2, 8
LAYERS = (2, 3, 3, 1)


def step_of(name: str, n_microbatches: int) -> ServedStep:
    """A step of one pipeline on one server: one document a nano-batch and stage."""
    n_nano_batches = n_microbatches * ROWS
    manifests = [
        RankManifest.from_lengths(0, rank, [[TOKENS]] * n_nano_batches) for rank in range(N_STAGES)
    ]
    numbers = np.arange(N_STAGES * n_nano_batches)
    tasks = TaskTable(
        numbers, np.zeros_like(numbers), np.full_like(numbers, TOKENS), np.zeros_like(numbers)
    )
    plan: Plan = make_plan(manifests, tasks)
    assert isinstance(plan.manifest, Manifest)
    job = JobDescription(
        job_id="job",
        verification_key=b"",
        n_ranks=N_STAGES,
        n_layers=max(LAYERS),
        n_nano_batches=n_nano_batches,
        shape=SHAPE,
        scale=SCALE,
        name="job",
        pipelining=Pipelining(
            schedule=SCHEDULES[name](N_STAGES, n_microbatches),
            pipeline_ranks=range(N_STAGES),
            layers=LAYERS,
            forward_seconds=[1.0] * N_STAGES,
            backward_seconds=[2.0] * N_STAGES,
        ),
    )
    return ServedStep(
        job,
        plan,
        server_id=plan.servers[0].server_id,
        local_rank=None,
        forward_only=False,
        device=torch.device("cpu"),
        on_tick_over=lambda step, tick: None,
    )


def program(job: JobDescription, rank: int) -> list[list[Tick]]:
    """By action with core attention, the ticks of ``rank``, in turns."""
    pipelining = job.pipelining
    assert pipelining is not None
    actions = []
    for action in pipelining.schedule.order(rank):
        phase = action.kind.attention_phase
        # PyTorch's first stage runs all of a backward in two parts with the second one.
        if rank == 0 and action.kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
            phase = None if action.kind is Kind.BACKWARD_INPUT else Phase.BACKWARD
        if phase is None:
            continue
        layers = list(pipelining.job_layers(action.stage))
        if phase is Phase.BACKWARD:
            layers.reverse()
        rows = [action.microbatch * ROWS + row for row in range(ROWS)]
        actions.append([Tick(0, layer, row, phase) for layer in layers for row in rows])
    return actions


def posted_by(due: Sequence[instructions.Instruction[int, ServedStep]]) -> set[Tick]:
    return {each.tick for each in due if isinstance(each, instructions.PostReceive)}


def most_posted_bytes(name: str, n_microbatches: int) -> int:
    """Of one rank after the other, running its program to the end; each alone."""
    step, most = step_of(name, n_microbatches), 0
    job = step.job
    for rank in range(N_STAGES):
        machine: ServerMachine[int, ServedStep] = ServerMachine("server")
        machine.open_job("job", job.n_nano_batches, job.order)
        machine.step_planned("job", step, step.outline)
        due = machine.connect("job", rank, rank, 0, 0)
        assert not isinstance(due, RankRefusal)
        posted = posted_by(due)
        for ticks in program(job, rank):
            for tick in ticks:
                pairs = [step.messages(rank, each) for each in posted]
                most = max(most, sum(each.request.nbytes + each.reply.nbytes for each in pairs))
                assert tick in posted, f"rank {rank} of {name} waits for {tick}"
                posted.remove(tick)
                posted |= posted_by(machine.answered(rank, tick))
        assert not posted
    return most


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble", "same-phase"])
def test_receives_do_not_grow_with_microbatches(name: str) -> None:
    few, many = most_posted_bytes(name, 8), most_posted_bytes(name, 64)
    assert few == many > 0


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_memory_that_is_set_aside_does_not_grow_with_microbatches(name: str) -> None:
    few, many = (
        max(sum(sizes) for sizes in step_of(name, n).held_bytes().values()) for n in (8, 64)
    )
    assert few == many
    # Of one rank: in some slot it is among those that are held.
    assert few >= most_posted_bytes(name, 8)


def test_memory_is_set_aside_for_what_runs_side_by_side() -> None:
    """1F1B: in the first slot only the first stage runs, in the second one the second as well."""
    step = step_of("1f1b", 8)
    job = step.job
    held = step.held_bytes()

    def of(rank: int, microbatch: int, phase: Phase) -> list[int]:
        ticks = [Tick(0, job.n_layers - 1, microbatch * ROWS + row, phase) for row in range(ROWS)]
        pairs = [step.messages(rank, tick) for tick in ticks]
        return [nbytes for pair in pairs for nbytes in (pair.request.nbytes, pair.reply.nbytes)]

    assert held[0] == of(0, 0, Phase.FORWARD)
    assert sorted(held[1]) == sorted(of(0, 1, Phase.FORWARD) + of(1, 0, Phase.FORWARD))


def test_limited_memory_is_enough_for_any_number_of_microbatches() -> None:
    step = step_of("1f1b", 64)
    job = step.job
    # Of each rank and row, the largest messages: what the next action may need.
    least = sum(
        max(step.messages(rank, tick).pool_bytes for ticks in program(job, rank) for tick in ticks)
        for rank in range(N_STAGES)
    )
    machine: ServerMachine[int, ServedStep] = ServerMachine("server", least * ROWS)
    machine.open_job("job", job.n_nano_batches, job.order)
    due = machine.step_planned("job", step, step.outline)
    assert due == [instructions.ReserveMemory(step)], "it is not refused"
