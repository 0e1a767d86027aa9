"""A forward pass of an attached model, from its first to its last hook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextvars import Token
from typing import Any

from trainer_client.attach.open_steps import OpenSteps
from trainer_client.step.lane import Lane, current_lane

Complete = Callable[[dict[str, Any]], dict[str, Any]]
"""Adds to a session's options those that follow from the model."""

OpenWith = Callable[[Complete], OpenSteps]
"""Gives the steps of an attached model, and opens its session if it has none."""


class Forward:
    """A forward that has begun; made when it begins."""

    def __init__(self) -> None:
        self._around = sys.exc_info()[1]
        self._steps: OpenSteps | None = None
        self._token: Token[Lane | None] | None = None
        self.lanes: list[Lane] = []

    @property
    def has_failed(self) -> bool:
        """True if an exception is leaving it."""
        return sys.exc_info()[1] is not self._around

    def begin(self, steps: OpenSteps, lengths: Sequence[int]) -> None:
        """Plan a step with documents of these lengths; core attention is served in its lane from
        here on, or in the lanes that it is to choose.

        Raises:
            PlanNotReady, SessionClosed: as of :meth:`Session.begin`.
        """
        self.lanes, self._steps = steps.begin(lengths), steps
        if len(self.lanes) == 1:
            self._token = current_lane.set(self.lanes[0])

    def end(self) -> None:
        """Leave the step, if there is one; its backward pass is to come.

        Raises:
            SessionError: the forward called core attention less often than the job expects.
        """
        if self._token is not None:
            current_lane.reset(self._token)
        if self._steps is not None:
            self._steps.returned(self.lanes, failed=self.has_failed)
