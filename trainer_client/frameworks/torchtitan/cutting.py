"""The cut of a batch into nano-batches that take turns: in its middle, or at a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer_client.frameworks.torchtitan.attention import ServedAttention
from trainer_client.frameworks.versions import convolutions
from trainer_client.turns.parts import RowPart, cut, neighbours


@dataclass(frozen=True)
class Cutting:
    """The way every batch is cut.

    Attributes:
        n_lanes: nano-batches of a batch: 1, or 2 for ping-pong.
        multiple: what the rows of a half must be divided by, without rest (sequence parallelism).
            A half without rows has so many tokens of padding: models run no empty batch.
        inside_documents: whether a document may begin in the first half and go on in the second.
    """

    n_lanes: int
    multiple: int
    inside_documents: bool

    def of(self, lengths: Sequence[int]) -> list[RowPart]:
        """The nano-batches of a batch with documents of ``lengths``."""
        if self.n_lanes == 1:
            return neighbours([sum(lengths)])
        return cut(
            lengths,
            self.n_lanes,
            multiple=self.multiple,
            inside_documents=self.inside_documents,
            may_be_empty=False,
        )


def padded(tensor: torch.Tensor, part: RowPart) -> torch.Tensor:
    """A nano-batch ``[1, rows + padding, ...]`` of ``tensor`` ``[B, L, ...]``; padding is 0."""
    return part.of(tensor.flatten(0, 1)[None], 1)


def padded_positions(positions: torch.Tensor, part: RowPart) -> torch.Tensor:
    """A copy of the same of positions, which count up in the padding: it is a document."""
    own = padded(positions, part).clone()
    own[:, part.n_rows :] = torch.arange(part.padding, device=own.device)
    return own


def why_documents_stay_whole(model: Any) -> str | None:
    """The reason why a decoder of torchtitan cannot run the halves of a document; None if it can.

    Between the halves only core attention passes anything on. Whatever else looks at neighbouring
    tokens would miss them at the cut.
    """
    if getattr(model, "mtp_layers", None):
        return "its layers of multi-token prediction look at the tokens that follow"
    without = [
        name
        for name, layer in getattr(model, "layers", {}).items()
        if not any(isinstance(each, ServedAttention) for each in layer.modules())
    ]
    if without:
        return f"layers {', '.join(without[:4])} mix tokens by other means than VarlenAttention"
    found = convolutions(model)
    return f"{found[0]} is a convolution over tokens" if found else None
