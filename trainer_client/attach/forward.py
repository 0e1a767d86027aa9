"""A forward pass of an attached model, from its first to its last hook."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import Token
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trainer_client.attach.open_steps import OpenSteps
from trainer_client.hooks.gradient_sync import is_last_of_round
from trainer_client.hooks.pipelining_dry_run import for_shapes
from trainer_client.step.lane import Lane, current_lane
from trainer_client.turns.branches import RowDocuments

Complete = Callable[[dict[str, Any]], dict[str, Any]]
"""Adds to a session's options those that follow from the model."""

OpenWith = Callable[[Complete], OpenSteps]
"""Gives the steps of an attached model, and opens its session if it has none."""


class Forward:
    """A forward that has begun; made when it begins.

    Args:
        model: that is called, or a part of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._is_last = is_last_of_round(model)
        self._around = sys.exc_info()[1]
        self._steps: OpenSteps | None = None
        self._token: Token[Lane | None] | None = None
        self._without_rows: OpenSteps | None = None
        self._shapes = ExitStack()
        self.lanes: list[Lane] = []

    @property
    def has_failed(self) -> bool:
        """True if an exception is leaving it."""
        return sys.exc_info()[1] is not self._around

    def begin(self, steps: OpenSteps, documents: RowDocuments) -> None:
        """Plan a step with these documents; core attention is served in its lane from here on, or
        in the lanes that it is to choose."""
        self.lanes, self._steps = steps.begin(documents, self._is_last), steps
        if len(self.lanes) == 1:
            self._token = current_lane.set(self.lanes[0])

    def begin_without_rows(self, steps: OpenSteps) -> None:
        """Plan none, since there are no documents: core attention is zeros. Idempotent."""
        if self._without_rows is None:
            self._without_rows = steps
            steps.begin_without_rows(self._is_last)
            self._shapes.enter_context(for_shapes())

    def end(self, output: Any) -> None:
        """Leave the step, if there is one; its backward pass is to come.

        Args:
            output: of the forward.
        """
        self._shapes.close()
        if self._without_rows is not None and self._is_last:
            steps = self._without_rows
            tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
            for tensor in [tensor for tensor in tensors if tensor.requires_grad][:1]:
                tensor.register_hook(lambda _: steps.end_without_rows())
        if self._token is not None:
            current_lane.reset(self._token)
        if self._steps is not None:
            self._steps.returned(self.lanes, failed=self.has_failed)
