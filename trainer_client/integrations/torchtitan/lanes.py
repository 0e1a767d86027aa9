"""The nano-batches of a batch run in turns, and their outputs joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainer_client.integrations.frameworks import UnsupportedSetting
from trainer_client.integrations.graphs import outside_graphs
from trainer_client.integrations.torchtitan.attention import is_validation
from trainer_client.integrations.torchtitan.cutting import Cut, Cutting, padded
from trainer_client.step.lane import in_nano_batch, require_step
from trainer_client.step.ping_pong import Call, run_in_turns

Output = Any
"""Of a decoder: a tensor ``[B, L, ...]``, or a list of them with multi-token prediction."""


class InTurns:
    """A model's forward, run for each nano-batch of a batch.

    Args:
        model: a decoder of torchtitan; its ``forward`` is replaced on the object, so that what
            wraps or shards it stays around it.
        cutting: how a batch is cut.

    Attributes:
        microbatch: the number of the batch in its step.
    """

    def __init__(self, model: Any, cutting: Cutting) -> None:
        self._model, self._cutting = model, cutting
        self._forward: Callable[..., Output] = model.forward
        self.microbatch = 0
        model.forward = self.run

    @outside_graphs
    def run(self, tokens: torch.Tensor, **kwargs: Any) -> Output:
        """The model's output for ``tokens`` ``[B, L]``; of validation, which nobody has planned, at
        once.

        Raises:
            UnsupportedSetting: the model has inputs that cannot be cut.
        """
        if is_validation():
            return self._forward(tokens, **kwargs)
        first = self.microbatch * self._cutting.n_lanes
        if self._cutting.n_lanes == 1:
            with in_nano_batch(first):
                output = self._forward(tokens, **kwargs)
            require_step().lane_returned(first)
            return output
        if others := sorted(set(kwargs) - {"positions", "attention_masks"}):
            raise UnsupportedSetting(
                f"the model is called with {', '.join(others)}, which cannot be cut into the two "
                "halves of a batch; set --distca.no-ping_pong"
            )
        positions = kwargs["positions"]
        cuts = self._cutting.of(positions)
        calls = [self._call(tokens, positions, each) for each in cuts]
        outputs = run_in_turns(self._forward, calls, first, is_last=True)
        return _joined(outputs, cuts, tokens.shape)

    def _call(self, tokens: torch.Tensor, positions: torch.Tensor, part: Cut) -> Call:
        own = padded(positions, part, count=True)
        # torchtitan finds documents by their zeros, and the first may have begun in the other half.
        begun = torch.cat([torch.zeros_like(own[:, :1]), own[:, 1:]], dim=1)
        masks = self._model.get_attention_masks(positions=begun)
        named = {"positions": own, "attention_masks": masks}
        return (padded(tokens, part, count=False),), named


def _joined(outputs: Sequence[Output], cuts: Sequence[Cut], shape: Sequence[int]) -> Output:
    """``[B, L, ...]`` without padding; a list of them if the model's outputs are lists."""
    if not all(isinstance(output, torch.Tensor) for output in outputs):
        return [_joined(each, cuts, shape) for each in zip(*outputs, strict=True)]
    rows = [output[:, : each.end - each.begin] for output, each in zip(outputs, cuts, strict=True)]
    whole = torch.cat(rows, dim=1)
    return whole.reshape(*shape, *whole.shape[2:])
