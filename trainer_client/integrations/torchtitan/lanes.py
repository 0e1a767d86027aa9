"""The nano-batches of a batch run in turns, and their outputs joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainer_client.integrations.frameworks import UnsupportedSetting
from trainer_client.integrations.graphs import outside_graphs
from trainer_client.integrations.torchtitan.attention import is_validation
from trainer_client.integrations.torchtitan.cutting import Cut, padded, padded_positions
from trainer_client.step.lane import in_nano_batch, require_step
from trainer_client.step.ping_pong import Call, run_in_turns

Output = Any
"""Of a decoder: a tensor ``[B, L, ...]``, or a list of them with multi-token prediction."""


class CutBatch:
    """The nano-batches of one call of a decoder.

    Args:
        model: a decoder of torchtitan, or a stage of one.
        cuts: where the batch is cut.
        named: what its ``forward`` is called with by name: ``positions`` ``[B, L]`` and
            ``attention_masks``.

    Raises:
        UnsupportedSetting: there are inputs that cannot be cut.
    """

    first = 0
    """Every nano-batch has rows."""

    def __init__(self, model: Any, cuts: Sequence[Cut], named: Mapping[str, Any]) -> None:
        if others := sorted(set(named) - {"positions", "attention_masks"}):
            raise UnsupportedSetting(
                f"the model is called with {', '.join(others)}, which cannot be cut into the two "
                "halves of a batch; set --distca.no-ping_pong"
            )
        self._model, self._cuts = model, cuts
        self._positions: torch.Tensor = named["positions"]

    def calls(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Call]:
        """The arguments for each nano-batch, of those of the batch.

        Args:
            args: tokens ``[B, L]`` or a stage's hidden states ``[B, L, D]``.
            kwargs: as given.
        """
        (inputs,) = args
        return [self._call(inputs, each) for each in self._cuts]

    def joined(self, outputs: Sequence[Output]) -> Output:
        """``[B, L, ...]`` without padding; a list of them if the model's outputs are lists."""
        if not all(isinstance(output, torch.Tensor) for output in outputs):
            return [self.joined(each) for each in zip(*outputs, strict=True)]
        rows = [
            output[:, : each.end - each.begin]
            for output, each in zip(outputs, self._cuts, strict=True)
        ]
        whole = torch.cat(rows, dim=1)
        return whole.reshape(*self._positions.shape, *whole.shape[2:])

    def _call(self, inputs: torch.Tensor, part: Cut) -> Call:
        own = padded_positions(self._positions, part)
        # torchtitan finds documents by their zeros, and the first may have begun in the other half.
        begun = torch.cat([torch.zeros_like(own[:, :1]), own[:, 1:]], dim=1)
        masks = self._model.get_attention_masks(positions=begun)
        return (padded(inputs, part),), {"positions": own, "attention_masks": masks}


class InTurns:
    """A model's forward, run for each nano-batch of a batch.

    Args:
        model: a decoder of torchtitan; its ``forward`` is replaced on the object, so that what
            wraps or shards it stays around it.
        cuts_of: where a batch of the running step is cut, by its number; nowhere if it has one
            nano-batch.

    Attributes:
        microbatch: the number of the batch in its step.
    """

    def __init__(self, model: Any, cuts_of: Callable[[int], Sequence[Cut]]) -> None:
        self._model, self._cuts_of = model, cuts_of
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
        # Known on the host since it was submitted: tensors on a GPU would have to be waited for.
        cuts = self._cuts_of(self.microbatch)
        first = self.microbatch * len(cuts)
        if len(cuts) == 1:
            with in_nano_batch(first):
                output = self._forward(tokens, **kwargs)
            require_step().lane_returned(first)
            return output
        batch = CutBatch(self._model, cuts, kwargs)
        calls = batch.calls((tokens,), kwargs)
        return batch.joined(run_in_turns(self._forward, calls, first, is_last=True))
