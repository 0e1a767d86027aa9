"""Stages tell each other, on the host, that they are about to send.

A receive of NCCL that is posted before its send keeps the receiver's device until the sender comes.
With core attention served the sender may need the receiver to come: it waits for attention from the
receiver's own server, whose first call of a CUDA function, or first launch of a kernel, waits for
the device (docs/benchmarks.md, "Calls of CUDA that wait"). Then nobody goes on. So a rank posts a
receive only when its sender has all that it sends, and is about to post it too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from trainer_client.errors import SessionError
from trainer_client.integrations.host_barriers import HostBarriers

_FORWARD, _BACKWARD = 0, 1


class HostSignals:
    """Signals between the ranks of a job, over gloo. To be made by all of them together.

    In a batch of sends and receives, sends must be asked for first, as PyTorch's schedules do: each
    of two ranks that exchange tells the other before it waits.

    Args:
        timeout_seconds: how long a rank waits for a signal before it gives up.
        n_stages: of the pipeline.
    """

    def __init__(self, timeout_seconds: float, n_stages: int) -> None:
        self._timeout_seconds, self._n_stages = timeout_seconds, n_stages
        self._barriers = HostBarriers(timeout_seconds)
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def meet(self) -> None:
        """Returns when all ranks have come."""
        self._barriers.meet()

    def begin_step(self) -> None:
        """Forgets the signals of the step before; all of them have arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def watch(self, stage: Any) -> None:
        """Has the sends and receives of a ``PipelineStage`` be signalled: the methods that list
        them are replaced on the object."""
        index = stage.stage_index
        for name, kind, receiver, act in (
            ("get_fwd_send_ops", _FORWARD, index + 1, self._tell),
            ("get_bwd_send_ops", _BACKWARD, index - 1, self._tell),
            ("get_fwd_recv_ops", _FORWARD, index, self._await),
            ("get_bwd_recv_ops", _BACKWARD, index, self._await),
        ):
            setattr(stage, name, self._signalled(getattr(stage, name), kind, receiver, act))

    def _signalled(
        self,
        method: Callable[[int], list[Any]],
        kind: int,
        receiver: int,
        act: Callable[[int, int], None],
    ) -> Callable[[int], list[Any]]:
        @functools.wraps(method)
        def signalled(microbatch: int) -> list[Any]:
            operations = method(microbatch)
            tag = (microbatch * self._n_stages + receiver) * 2 + kind
            for peer in {operation.peer for operation in operations}:
                act(peer, tag)
            return operations

        return signalled

    def _tell(self, peer: int, tag: int) -> None:
        signal = torch.zeros(1)
        # Ranks of the group are those of the job: it is made of all.
        self._sent.append((self._barriers.group.send([signal], peer, tag), signal))

    def _await(self, peer: int, tag: int) -> None:
        try:
            self._barriers.group.recv([torch.zeros(1)], peer, tag).wait()
        except RuntimeError as error:
            raise SessionError(
                f"rank {peer} of the pipeline has not sent what this stage needs within "
                f"{self._timeout_seconds:.0f} s, or has ended: {error}; its log says why"
            ) from error
