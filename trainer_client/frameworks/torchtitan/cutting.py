"""Where a batch is cut into the nano-batches that take turns: in its middle, or at a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from core_attention.manifest import Segment
from trainer_client.frameworks.torchtitan.attention import ServedAttention
from trainer_client.step.manifests import lengths_of_documents, split_documents, split_row


@dataclass(frozen=True)
class Cut:
    """A nano-batch: rows ``[begin, end)`` of a batch, flattened, and a document of padding after
    them whose outputs are dropped.

    Attributes:
        padding: tokens of it; 0 if there is none.
    """

    begin: int
    end: int
    padding: int = 0


@dataclass(frozen=True)
class Cutting:
    """How every batch is cut.

    Attributes:
        n_lanes: nano-batches of a batch: 1, or 2 for ping-pong.
        multiple: what the rows of a half must be divided by, without rest (sequence parallelism).
            A half without rows has so many tokens of padding: models run no empty batch.
        inside_documents: whether a document may begin in the first half and go on in the second.
    """

    n_lanes: int
    multiple: int
    inside_documents: bool

    def of(self, positions: torch.Tensor) -> list[Cut]:
        """The nano-batches of a batch: halves with equally many rows, up to ``multiple``; if
        documents stay whole, as equal as they allow.

        Args:
            positions: ``[B, L]``, 0 where a document begins.
        """
        rows = positions.numel()
        if self.n_lanes == 1:
            return [Cut(0, rows)]
        if self.inside_documents:
            middle = min(-(-rows // (2 * self.multiple)) * self.multiple, rows)
        else:
            lengths = lengths_of_documents(positions.flatten())
            middle = sum(split_documents(lengths, 2)[0])
        return [
            Cut(begin, end, -(end - begin) % self.multiple or (0 if end > begin else self.multiple))
            for begin, end in ((0, middle), (middle, rows))
        ]


def segments_of(
    positions: torch.Tensor, cuts: Sequence[Cut], ids: Iterator[int]
) -> list[list[Segment]]:
    """What each nano-batch of a batch holds, for the manifest.

    Args:
        positions: as of :meth:`Cutting.of`, which gave ``cuts``.
        ids: of documents; one is taken for each.

    Raises:
        ManifestError: positions do not begin at 0, or do not count up by one.
    """
    lengths = lengths_of_documents(positions.flatten())
    halves = split_row(lengths, [each.end for each in cuts], ids)
    for segments, each in zip(halves, cuts, strict=True):
        if each.padding:
            segments.append(Segment(next(ids), each.padding, 0, each.padding))
    return halves


def padded(tensor: torch.Tensor, part: Cut) -> torch.Tensor:
    """A nano-batch ``[1, rows + padding, ...]`` of ``tensor`` ``[B, L, ...]``; padding is 0."""
    rows = tensor.flatten(0, 1)[part.begin : part.end]
    return torch.cat([rows, rows.new_zeros(part.padding, *rows.shape[1:])])[None]


def padded_positions(positions: torch.Tensor, part: Cut) -> torch.Tensor:
    """The same of positions, which count up in the padding: it is a document."""
    own = padded(positions, part)
    own[:, part.end - part.begin :] = torch.arange(part.padding, device=own.device)
    return own


def why_documents_stay_whole(model: Any) -> str | None:
    """Why a decoder of torchtitan cannot run the halves of a document, in words; None if it can.

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
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d):
            return f"{name} is a convolution over tokens"
    return None
