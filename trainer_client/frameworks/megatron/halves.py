"""A microbatch cut into two nano-batches, its halves: in its middle, or where a document begins."""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from trainer_client.frameworks.versions import UnsupportedSetting
from trainer_client.turns.parts import RowPart, cut, rows_joined

_BOUNDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_LONGEST = ("max_seqlen_q", "max_seqlen_kv")
_AS_THEY_ARE = ("qkv_format", "local_cp_size", "cp_group", "pad_between_seqs")
_OF_HALVES = (*_BOUNDS, *_LONGEST, "total_tokens", "seq_idx", "tokens_per_sample")
"""Fields of ``PackedSeqParams``; of some, not every version has them."""


@dataclass(frozen=True)
class Half(RowPart):
    """A part of a microbatch, by its documents.

    Attributes:
        first, last: the documents that it has rows of, ``[first, last)``.
        begun: whether its first document begins in the half before.
        longest: tokens of its longest document up to the end of this half.
    """

    first: int = 0
    last: int = 0
    begun: bool = False
    longest: int = 0


def halves_of(
    bounds: Sequence[int], *, multiple: int, may_be_empty: bool, inside_documents: bool
) -> list[Half]:
    """The halves of a microbatch, see :func:`trainer_client.turns.parts.cut`.

    Args:
        bounds: ``[documents + 1]`` cumulative lengths, from 0 up.
    """
    parts = cut(
        [end - begin for begin, end in pairwise(bounds)],
        2,
        multiple=multiple,
        inside_documents=inside_documents,
        may_be_empty=may_be_empty,
    )
    return [_by_documents(part, bounds) for part in parts]


def _by_documents(part: RowPart, bounds: Sequence[int]) -> Half:
    first, last = bisect_right(bounds, part.begin) - 1, bisect_left(bounds, part.end)
    lengths = (min(bounds[i + 1], part.end) - bounds[i] for i in range(first, last))
    return Half(
        part.begin,
        part.end,
        part.padding,
        first,
        last,
        begun=bounds[first] < part.begin,
        longest=max([part.padding, *lengths]),
    )


@dataclass(frozen=True)
class Layout:
    """The places of a microbatch's rows in its tensors.

    Attributes:
        packed: documents are packed into one row; else each has a row of its own, of one length.
        shards: ranks that share the rows of hidden states (sequence parallelism), where these are
            not gathered: of documents with rows of their own.
    """

    packed: bool
    shards: int = 1

    def of_tokens(self, tensor: torch.Tensor, half: Half, fill: int = 0) -> torch.Tensor:
        """A half of token ids, positions, labels or masks ``[..., b, s]``; padding is ``fill``."""
        if self.packed:
            return half.of(tensor, tensor.dim() - 1, fill)
        if half.first == half.last:
            return tensor.new_full((*tensor.shape[:-2], 1, half.padding), fill)
        return tensor.narrow(-2, half.first, half.last - half.first)

    def of_hidden(self, tensor: torch.Tensor, half: Half) -> torch.Tensor:
        """A half of hidden states ``[s, b, h]``, which a pipeline hands on; padding is 0."""
        if self.packed:
            return half.of(tensor, 0)
        if half.first == half.last:
            return tensor.new_zeros((half.padding // self.shards, 1, tensor.shape[2]))
        return tensor.narrow(1, half.first, half.last - half.first)

    def joined(
        self, outputs: Sequence[torch.Tensor], halves: Sequence[Half], *, hidden: bool
    ) -> torch.Tensor:
        """The output of a microbatch, without padding; no view of another tensor, since Megatron
        frees what it has sent.

        Args:
            outputs: of the halves.
            halves: likewise.
            hidden: whether these are ``[s, b, h]``, or losses or logits ``[b, s, ...]``.
        """
        dim = int(self.packed != hidden)
        if self.packed:
            return rows_joined(outputs, halves, dim)
        first, *others = [
            output.narrow(dim, 0, half.last - half.first)
            for output, half in zip(outputs, halves, strict=True)
        ]
        # A half without rows stays part of the output, so that its backward pass is run.
        empty = first.narrow(dim, 0, 0).shape
        return torch.cat([first, *(o if o.numel() else o.reshape(empty) for o in others)], dim)


def with_bounds(packed: Any, of: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """A copy of Megatron's ``PackedSeqParams`` with other bounds of documents. It is a shallow
    copy: what its ``__post_init__`` does waits for the GPU.

    Args:
        packed: what is copied.
        of: of the name and the value of a field, what to put there. It is called once for each
            object: what is one tensor stays one, and so is seen to be equal.
    """
    own = copy.copy(packed)
    found: dict[int, torch.Tensor] = {}
    for name in _BOUNDS:
        if (given := getattr(packed, name, None)) is not None:
            if id(given) not in found:
                found[id(given)] = of(name, given)
            setattr(own, name, found[id(given)])
    return own


def packed_of(packed: Any, half: Half) -> Any:
    """Megatron's ``PackedSeqParams`` of a half, found without waiting for a GPU."""

    given = {name for name, value in vars(packed).items() if value is not None}
    if others := sorted(given - {*_OF_HALVES, *_AS_THEY_ARE}):
        raise UnsupportedSetting(
            f"packed_seq_params have {', '.join(others)}, which cannot be cut; leave it out, or "
            "open the steps with ping_pong=False"
        )

    def of_half(_: str, bounds: torch.Tensor) -> torch.Tensor:
        inner = bounds.flatten()[half.first : half.last + 1].clamp(half.begin, half.end)
        inner = inner - half.begin
        return torch.cat([inner, inner[-1:] + half.padding][: 1 + bool(half.padding)])

    own = with_bounds(packed, of_half)
    for name in given & set(_LONGEST):
        setattr(own, name, half.longest)
    if "total_tokens" in given:
        own.total_tokens = half.n_rows + half.padding
    if "seq_idx" in given:
        index = packed.seq_idx.narrow(-1, half.begin, half.n_rows) - half.first
        padding = index.new_full((*index.shape[:-1], half.padding), half.last - half.first)
        own.seq_idx = torch.cat([index, padding], -1)
    if "tokens_per_sample" in given:
        # Halves do not hold whole samples.
        own.tokens_per_sample = None
    return own
