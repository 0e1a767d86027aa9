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

    @property
    def has_failed(self) -> bool:
        """True if an exception is leaving it."""
        return sys.exc_info()[1] is not self._around

    def begin(self, steps: OpenSteps, lengths: Sequence[int]) -> None:
        """Plan a step with documents of these lengths; core attention is served in it from here on.

        Raises:
            PlanNotReady, SessionClosed: as of :meth:`Session.begin`.
        """
        self._token = current_lane.set(steps.begin(lengths))
        self._steps = steps

    def end(self) -> None:
        """Leave the step, if there is one; its backward pass is to come.

        Raises:
            SessionError: the forward called core attention less often than the job expects.
        """
        if self._steps is None or self._token is None:
            return
        lane = current_lane.get()
        current_lane.reset(self._token)
        assert lane is not None
        self._steps.returned(lane, failed=self.has_failed)
