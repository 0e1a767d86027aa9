"""The calls of core attention in one lane, compared with what the job expects.

Servers expect a lane's ticks in a fixed order: forward by layer, then backward mirrored, down to
the lowest layer that needs gradients. A model that calls otherwise would leave everybody waiting
for ticks that never come, so the first call that is out of order is an error, here and at once.

Pure state; who calls it sees to threads.
"""

from __future__ import annotations

from trainer_client.errors import SessionError


class LaneCalls:
    """The calls of one nano-batch in a step.

    Args:
        where: the step and nano-batch, for errors.
        n_layers: calls in one forward.
        first_layer: what the first of them is called: not 0 on ranks of a pipeline that have fewer
            layers than others.
        head_groups: ticks of a call; 1 if ``first_layer`` is not 0.
        forward_only: the step has no backward pass, whatever needs gradients.
    """

    def __init__(
        self,
        where: str,
        n_layers: int,
        *,
        forward_only: bool,
        first_layer: int = 0,
        head_groups: int = 1,
    ) -> None:
        self.n_layers = n_layers
        self.head_groups = head_groups
        self.first_layer = first_layer
        self._where = where
        self._forward_only = forward_only
        self._before_stage, self._end_of_stage = 0, n_layers
        self._said = f"the job has n_layers={n_layers}; set n_layers to the calls in one forward"
        self._needs_backward: list[bool] = []
        self._next_backward = n_layers - 1
        self._stopped_at: int | None = None

    @property
    def forward_calls(self) -> int:
        """Calls so far."""
        return len(self._needs_backward)

    @property
    def backward_calls(self) -> int:
        """Backward calls so far."""
        return self.n_layers - 1 - self._next_backward

    @property
    def end(self) -> int | None:
        """The place in the job's lane behind its last tick; None until its last forward call has
        come."""
        if self._stopped_at is not None:
            return self._stopped_at
        if self.forward_calls < self.n_layers:
            return None
        return self.first_layer + self.head_groups * (self.n_layers + self.expected_backward_calls)

    @property
    def expected_backward_calls(self) -> int:
        """Backward calls that will come, as far as forward calls have."""
        return sum(self._needs_backward)

    def stage_begins(self, stage: int, n_layers: int) -> None:
        """The forward pass of a stage of a pipeline begins, which has ``n_layers`` calls.

        Servers expect them in that action of the schedule: those of another stage of the rank,
        which may be too many by as much as these are too few, would be waited for in vain.
        """
        self._before_stage = self.forward_calls
        self._end_of_stage = self._before_stage + n_layers
        self._said = (
            f"layers of Pipelining has {n_layers} for stage {stage}; set it to the calls in one "
            "forward of each stage"
        )

    def forward(self, needs_backward: bool) -> int:
        """Counts a forward call; returns its layer, of the job.

        Args:
            needs_backward: gradients of its result are wanted: grad mode is on, and one of q, k
                and v requires them.
        """
        layer = self.forward_calls
        if layer == min(self.n_layers, self._end_of_stage):
            raise SessionError(
                f"{self._where} calls core attention more than {layer - self._before_stage} times, "
                f"but {self._said}, and run each nano-batch once a step"
            )
        needs_backward = needs_backward and not self._forward_only
        if any(self._needs_backward) and not needs_backward:
            lower = self._needs_backward.index(True)
            raise SessionError(
                f"{self._where}: layer {layer} takes no part in the backward pass, though layer "
                f"{lower} below it does; submit the step with forward_only=True, or detach neither"
            )
        self._needs_backward.append(needs_backward)
        return self.first_layer + layer

    def stop(self, end: int) -> None:
        """The lane ends before place ``end``, whatever calls come."""
        self._stopped_at = end

    def returned(self) -> None:
        """The forward pass of the lane is over, or that of a stage in it."""
        if self.forward_calls < self._end_of_stage:
            made = self.forward_calls - self._before_stage
            raise SessionError(
                f"{self._where} called core attention {made} times, but "
                f"{self._said}{_FEWER if made else _NONE}"
            )

    def backward(self, layer: int) -> None:
        """A backward call of ``layer``, of the job, comes."""
        self.returned()
        layer -= self.first_layer
        if layer != self._next_backward:
            raise SessionError(
                f"{self._where}: backward came to layer {layer} while layer {self._next_backward} "
                f"is next ({self.backward_calls} of {self.expected_backward_calls} made); the loss "
                "must depend on every trained layer"
            )
        self._next_backward -= 1


_FEWER = " (of a hybrid only some layers compute attention)"
_NONE = "; load the model with attn_implementation='distca', or call trainer_client.core_attention"
