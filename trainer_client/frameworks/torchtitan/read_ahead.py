"""torchtitan's data loader, read some steps ahead, so that each step is planned before its use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader

from trainer_client.loops.held_batch import own_copy

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Model inputs, with ``input`` and ``positions`` ``[B, L]``, and labels."""


class ReadAhead(BaseDataLoader):
    """Hands out copies of the batches of ``loader`` one by one, and reads further than that.

    Its state is that of the batches handed out, at the end of a step: training goes on after a
    checkpoint with the batch that comes next.

    Args:
        loader: torchtitan's.
    """

    def __init__(self, loader: BaseDataLoader) -> None:
        self._loader = loader
        self._plan: Callable[[list[Batch]], None] = lambda batches: None
        self._batches_of_step, self._ahead, self._most = 1, 0, 0
        self._handed_out: dict[str, Any] | None = None
        self._steps: deque[tuple[list[Batch], dict[str, Any]]] = deque()
        self._source: Iterator[Batch] | None = None

    def plan_by(
        self, plan: Callable[[list[Batch]], None], *, batches_of_step: int, ahead: int, most: int
    ) -> None:
        """To be called before the first batch is taken.

        Args:
            plan: called with each step's batches, some steps before they are handed out.
            batches_of_step: gradient accumulation steps times microbatches.
            ahead: how many steps are read beyond the one that is handed out.
            most: steps are read at most.
        """
        self._plan, self._batches_of_step = plan, batches_of_step
        self._ahead, self._most = ahead, most

    def is_step_planned(self) -> bool:
        """Return whether the next batches are a whole step, which was planned."""
        self._read()
        return bool(self._steps) and len(self._steps[0][0]) == self._batches_of_step

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self._read()
            if not self._steps:
                return
            batches, after = self._steps[0]
            yield from batches[:-1]
            self._steps.popleft()
            self._handed_out = after
            yield batches[-1]

    def _read(self) -> None:
        if self._source is None:
            self._source = iter(self._loader)
        while len(self._steps) <= self._ahead and self._most > 0:
            self._most -= 1
            batches = [
                own_copy(batch)
                for _, batch in zip(range(self._batches_of_step), self._source, strict=False)
            ]
            if not batches:
                self._most = 0
                return
            self._steps.append((batches, self._loader.state_dict()))
            if len(batches) == self._batches_of_step:
                self._plan(batches)

    def state_dict(self) -> dict[str, Any]:
        """The state after what was handed out."""
        if self._handed_out is not None:
            return self._handed_out
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Before the first batch is taken."""
        self._loader.load_state_dict(state_dict)
