"""Stages of ``torch.distributed.pipelining`` whose core attention is served.

A rank of the pipeline is a rank of the job, its microbatches are the job's nano-batches: they may
run in any order, so every schedule works. Each microbatch's attention is spread over all ranks, so
ranks whose stage idles serve the others (arXiv 2510.18121, section 4.4).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainer_client.errors import SessionError
from trainer_client.integrations.shape_inference import ShapeInference
from trainer_client.session import Session
from trainer_client.step.lane import in_nano_batch, require_step
from trainer_client.step.running_step import RunningStep

_IN_ITS_LANE = "_distca_in_its_lane"
"""Marks methods that were replaced."""


class Pipeline:
    """The stages of this rank.

    Open the session with ``n_nano_batches`` as the microbatches of a step, and ``n_layers`` as the
    calls of core attention in all stages of one rank, which every rank must have alike. Submit for
    each step what every microbatch holds (:func:`trainer_client.submit_ahead` does), on every rank
    of a pipeline the same documents; then run ``schedule.step(...)`` in ``pipeline.step(n)``.

    Args:
        session: of this rank.
        stages: its ``PipelineStage`` objects, those of lower layers first; their
            ``forward_one_chunk`` is replaced on the objects.

    Raises:
        SessionError: no stages were given, or one has no ``forward_one_chunk``, or is in another
            ``Pipeline``.
    """

    def __init__(self, session: Session, *stages: Any) -> None:
        if not stages:
            raise SessionError("no stages were given; a pipeline has one or more on every rank")
        self._session = session
        for stage in stages:
            forward = getattr(stage, "forward_one_chunk", None)
            if forward is None:
                raise SessionError(
                    f"{type(stage).__name__} has no forward_one_chunk; give stages of "
                    "torch.distributed.pipelining, such as PipelineStage"
                )
            if getattr(forward, _IN_ITS_LANE, False):
                raise SessionError(
                    f"stage {getattr(stage, 'stage_index', '?')} is in a Pipeline already; make "
                    "one for all stages of the rank, and keep it"
                )
        self._inference = ShapeInference()
        for stage in stages:
            stage.forward_one_chunk = self._in_its_lane(
                stage.forward_one_chunk, is_last=stage is stages[-1]
            )

    @contextmanager
    def step(self, step: int) -> Iterator[RunningStep]:
        """As :meth:`Session.step`, for one ``schedule.step`` or ``eval``.

        What runs before its first microbatch is PyTorch finding out shapes (at first, and where
        training and evaluation alternate): core attention gives zeros there, and is not served.
        """
        self._inference.is_over = False
        with self._session.step(step) as running, self._inference.may_run():
            yield running

    def _in_its_lane(self, forward: Callable[..., Any], *, is_last: bool) -> Callable[..., Any]:
        """``forward_one_chunk`` of a stage, which runs each microbatch in its own lane."""

        @functools.wraps(forward)
        def forward_one_chunk(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            self._inference.is_over = True
            with in_nano_batch(fwd_chunk_id):
                output = forward(fwd_chunk_id, *args, **kwargs)
            if is_last:
                require_step().lane_returned(fwd_chunk_id)
            return output

        setattr(forward_one_chunk, _IN_ITS_LANE, True)
        return forward_one_chunk
