"""Which step the tensors are of that stages send each other.

PyTorch's messages between stages say nothing of themselves: a rank that leaves a step out, or goes
on after an error in the middle of one, would take a neighbour's tensors of another step for its
own, and train on. So a label travels with each message, and is looked at before it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from trainer_client.errors import SessionError
from trainer_client.step.lane import current_step

_BETWEEN_STEPS = -1
"""Labels an evaluation that nobody has planned."""


def running_step() -> int:
    """The number of the caller's step; -1 outside of one."""
    running = current_step.get()
    return _BETWEEN_STEPS if running is None else running.step


class StageLabels:
    """The labels of messages to and from a rank's stages.

    Args:
        stages: ``PipelineStage`` objects of this rank, on a CPU; methods are replaced on them.
    """

    def __init__(self, stages: tuple[Any, ...]) -> None:
        # Of messages on their way to a stage, by direction.
        self._arriving: dict[tuple[str, int, int], tuple[Any, torch.Tensor]] = {}
        for stage in stages:
            for direction, to in (("fwd", stage.stage_index + 1), ("bwd", stage.stage_index - 1)):
                send, receive = f"get_{direction}_send_ops", f"get_{direction}_recv_ops"
                setattr(stage, send, self._labelled(getattr(stage, send), direction, to))
                receives = self._with_label(getattr(stage, receive), direction, stage.stage_index)
                setattr(stage, receive, receives)
            for direction, runs in (("fwd", "forward_one_chunk"), ("bwd", "backward_one_chunk")):
                checked = self._checked(getattr(stage, runs), direction, stage.stage_index)
                setattr(stage, runs, checked)

    def _labelled(
        self, method: Callable[[int], list[Any]], direction: str, to: int
    ) -> Callable[[int], list[Any]]:
        @functools.wraps(method)
        def send(microbatch: int) -> list[Any]:
            operations = method(microbatch)
            return operations + [
                _beside(operation, _label(direction, to, microbatch))
                for operation in operations[:1]
            ]

        return send

    def _with_label(
        self, method: Callable[[int], list[Any]], direction: str, stage: int
    ) -> Callable[[int], list[Any]]:
        @functools.wraps(method)
        def receive(microbatch: int) -> list[Any]:
            operations = method(microbatch)
            for operation in operations[:1]:
                label = torch.zeros_like(_label(direction, stage, microbatch))
                self._arriving[direction, stage, microbatch] = operation.peer, label
                operations = [*operations, _beside(operation, label)]
            return operations

        return receive

    def _checked(self, method: Callable[..., Any], direction: str, stage: int) -> Any:
        @functools.wraps(method)
        def run(chunk: int, *args: Any, **kwargs: Any) -> Any:
            if arrived := self._arriving.pop((direction, stage, chunk), None):
                peer, label = arrived
                if not torch.equal(label, _label(direction, stage, chunk)):
                    raise SessionError(of_another_step(peer, int(label[0]), running_step()))
            return method(chunk, *args, **kwargs)

        return run


def of_another_step(peer: int, step: int, own: int) -> str:
    """Says that ``peer``, a rank of ``torch.distributed``, has sent what is of ``step``, and not
    what this rank needs in step ``own``."""
    return (
        f"rank {peer} sent tensors of {_name(step)}, and this rank runs "
        f"{'another part of it' if own == step else _name(own)}; the ranks of a pipeline run the "
        "same steps and leave out the same ones, and none goes on after an error that others did "
        "not have: end the job, and resume it from a checkpoint"
    )


def _name(step: int) -> str:
    return "an evaluation outside of steps" if step == _BETWEEN_STEPS else f"step {step}"


def _label(direction: str, stage: int, microbatch: int) -> torch.Tensor:
    return torch.tensor([running_step(), direction == "bwd", stage, microbatch])


def _beside(operation: Any, label: torch.Tensor) -> dist.P2POp:
    """What sends or receives ``label`` right behind the tensor of ``operation``."""
    return dist.P2POp(operation.op, label, operation.peer, operation.group, operation.tag)
