"""How long the stages of a pipeline take beside core attention: what idle-aware plans rest on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from core_attention.errors import ScheduleError
from core_attention.pipelining import Pipelining
from core_attention.schedule import Schedule
from trainer_client.hooks.kept_state import state_kept
from trainer_client.hooks.pipelining_dry_run import for_shapes

_RUNS = 3

MEASURED_TOKENS = 8192
"""Enough to keep a GPU busy; a whole microbatch would have all its logits at once."""

Stage = tuple[nn.Module, Callable[[], torch.Tensor]]
"""A stage's module, and a call of it on an input of its own: token ids, or hidden states that
require gradients."""


class StageSeconds(NamedTuple):
    """Seconds of one token in each stage beside core attention, as
    :class:`~core_attention.pipelining.Pipelining` takes them."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]


def measure_stages(
    stages: Mapping[int, Stage],
    n_stages: int,
    n_tokens: int,
    group: dist.ProcessGroup | None = None,
) -> StageSeconds:
    """Times each stage forward and backward, with core attention answered by zeros, on all ranks at
    once; all get the same figures.

    Call it before the session is opened, on every rank of ``group``, as the model is trained: on
    its device, with its activation checkpoints, but before its weights are sharded. Gradients of
    parameters, buffers and random number generators are left as they were.

    Args:
        stages: by index, those of this rank.
        n_stages: of the model.
        n_tokens: of each input.
        group: the ranks of all pipelines; all ranks if None.
    """
    own = {index: _time(stage, n_tokens) for index, stage in stages.items()}
    everybody: list[dict[int, tuple[float, float]]] = [own]
    if dist.is_initialized():
        everybody = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everybody, own, group)
    forward, backward = [], []
    for index in range(n_stages):
        found = [seconds[index] for seconds in everybody if index in seconds]
        if not found:
            raise ScheduleError(
                f"no rank has stage {index} of {n_stages}; give measure_stages the stages of each"
            )
        forward.append(statistics.mean(each[0] for each in found))
        backward.append(statistics.mean(each[1] for each in found))
    return StageSeconds(tuple(forward), tuple(backward))


def measured_pipelining(
    schedule: Schedule,
    stages: Mapping[int, Stage],
    layers: Mapping[int, int],
    n_tokens: int,
    ranks_of_stage: int,
) -> Pipelining:
    """The facts of pipelines that the session needs, the same on all ranks, which call it together.

    Args:
        schedule: all of a pipeline.
        stages: by index, those of this rank.
        layers: likewise, how many are served.
        n_tokens: of each stage's input.
        ranks_of_stage: ranks of the job that have the same stages: those of pipeline rank 0 come
            first, then those of 1.
    """
    seconds = measure_stages(stages, schedule.n_stages, n_tokens)
    return Pipelining(
        schedule=schedule,
        pipeline_ranks=[
            rank // ranks_of_stage for rank in range(schedule.n_ranks * ranks_of_stage)
        ],
        layers=_layers_of_stages(layers, schedule.n_stages),
        **seconds._asdict(),
    )


def _layers_of_stages(own: Mapping[int, int], n_stages: int) -> list[int]:
    everybody: list[Mapping[int, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, own)
    known = {index: layers for each in everybody for index, layers in each.items()}
    return [known.get(index, 0) for index in range(n_stages)]


def _time(stage: Stage, n_tokens: int) -> tuple[float, float]:
    """Seconds of one token, forward and backward: the least of some runs."""
    module, run = stage
    gradients = [parameter.grad for parameter in module.parameters()]
    found = []
    try:
        with state_kept(module):
            for _ in range(1 + _RUNS):
                with for_shapes():
                    begin = _now()
                    output = run()
                    middle = _now()
                    output.backward(torch.zeros_like(output))
                    found.append((middle - begin, _now() - middle))
    finally:
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.grad = gradient
    # The first one warms up.
    forward, backward = (min(times) / n_tokens for times in zip(*found[1:], strict=True))
    return forward, backward


def _now() -> float:
    """When all that was launched on the device has run."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
