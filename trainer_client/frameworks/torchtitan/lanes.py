"""A batch cut into its nano-batches, and their outputs joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer_client.frameworks.torchtitan.cutting import padded, padded_positions
from trainer_client.frameworks.versions import UnsupportedSetting
from trainer_client.models.documents import documents_of
from trainer_client.step.lane import Lane, require_step
from trainer_client.step.ping_pong import Call
from trainer_client.turns.parts import RowPart, joined, rows_joined

Output = Any
"""Output of a decoder: a tensor ``[B, L, ...]``, or a list of them with multi-token prediction."""


@dataclass(frozen=True)
class SubmittedBatch:
    """The knowledge of a batch on the host since it was submitted.

    Attributes:
        positions: ``[B, L]``, 0 where a document begins.
        cuts: its nano-batches.
        first: the first of them in its step.
    """

    positions: torch.Tensor
    cuts: Sequence[RowPart]
    first: int


class CutBatch:
    """A batch of a decoder that is run in its nano-batches.

    Args:
        model: a decoder of torchtitan, or a stage of one.
        planned: what was submitted of the batch.
    """

    first = 0
    """Every nano-batch has rows."""

    def __init__(self, model: Any, planned: SubmittedBatch) -> None:
        self._model, self._planned, self._cuts = model, planned, planned.cuts

    def calls(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Call]:
        """The arguments for each nano-batch, of those of the batch.

        Args:
            args: tokens ``[B, L]`` or a stage's hidden states ``[B, L, D]``.
            kwargs: ``positions`` ``[B, L]`` and ``attention_masks``.
        """
        if others := sorted(set(kwargs) - {"positions", "attention_masks"}):
            raise UnsupportedSetting(
                f"the model is called with {', '.join(others)}, which cannot be cut into the two "
                "halves of a batch; set --distca.no-ping_pong"
            )
        (inputs,), positions = args, kwargs["positions"]
        if positions.shape != self._planned.positions.shape:
            raise ValueError(
                f"positions have shape {tuple(positions.shape)}, and those of "
                f"{tuple(self._planned.positions.shape)} were submitted; run the batches in order"
            )
        return [
            self._call(inputs, positions, nano_batch, part)
            for nano_batch, part in enumerate(self._cuts, self._planned.first)
        ]

    def joined(self, outputs: Sequence[Output]) -> Output:
        """``[B, L, ...]`` without padding; a list of them if the model's outputs are lists."""
        return joined(outputs, self._join)

    def _join(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = rows_joined(outputs, self._cuts, 1)
        return whole.reshape(*self._planned.positions.shape, *whole.shape[2:])

    def _call(
        self, inputs: torch.Tensor, positions: torch.Tensor, nano_batch: int, part: RowPart
    ) -> Call:
        own = padded_positions(positions, part)
        documents_of(Lane.of(require_step(), nano_batch)).check({"position_ids": own})
        # torchtitan finds documents by their zeros, and the first may have begun in the other half.
        # For those of a GPU the thread would wait, and keep others from launching their kernels.
        begun = padded_positions(self._planned.positions, part)
        begun[:, :1] = 0
        masks = self._model.get_attention_masks(positions=begun)
        return (padded(inputs, part),), {"positions": own, "attention_masks": masks}
