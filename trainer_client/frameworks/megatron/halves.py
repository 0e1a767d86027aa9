"""A microbatch cut into two nano-batches, its halves: in its middle, or where a document begins."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from core_attention.manifest import Segment
from trainer_client.frameworks.versions import UnsupportedSetting
from trainer_client.step.manifests import split_documents

_BOUNDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_LONGEST = ("max_seqlen_q", "max_seqlen_kv")
_AS_THEY_ARE = ("qkv_format", "local_cp_size", "cp_group", "pad_between_seqs")
_OF_HALVES = (*_BOUNDS, *_LONGEST, "total_tokens", "seq_idx", "tokens_per_sample")
"""Fields of ``PackedSeqParams``; of some, not every version has them."""


@dataclass(frozen=True)
class Half:
    """Neighbouring rows of a microbatch, and a document of padding after them whose outputs are
    dropped.

    Attributes:
        first, last: the documents that it has rows of, ``[first, last)``.
        bounds: ``[documents + 1]`` where its rows of each begin in the microbatch, then their end.
        begun: tokens of its first document that lie in the half before.
        padding: tokens of the padding; 0 if there is none.
    """

    first: int
    last: int
    bounds: tuple[int, ...]
    begun: int = 0
    padding: int = 0

    @property
    def n_rows(self) -> int:
        """Without padding."""
        return self.bounds[-1] - self.bounds[0]

    @property
    def longest(self) -> int:
        """Tokens of its longest document up to the end of this half."""
        lengths = [end - begin for begin, end in pairwise(self.bounds)]
        if lengths:
            lengths[0] += self.begun
        return max([self.padding, *lengths])


def cut(
    bounds: Sequence[int], *, multiple: int, may_be_empty: bool, inside_documents: bool
) -> list[Half]:
    """The halves of a microbatch: of equally many rows, up to ``multiple``; if documents stay
    whole, as equal as these allow.

    Args:
        bounds: ``[documents + 1]`` cumulative lengths, from 0 up.
        multiple: what the rows of a half must be divided by, without rest (sequence parallelism);
            padding sees to it.
        may_be_empty: whether the second half of a microbatch that cannot be divided may have no
            rows. If not, it has ``multiple`` tokens of padding, for collectives in which other
            ranks await this one.
        inside_documents: whether a document may begin in the first half and go on in the second.
    """
    bounds = tuple(bounds)
    n_rows = bounds[-1]
    if inside_documents:
        middle = min(-(-n_rows // (2 * multiple)) * multiple, n_rows)
    else:
        lengths = [end - begin for begin, end in pairwise(bounds)]
        middle = sum(split_documents(lengths, 2)[0])
    at = bisect_left(bounds, middle)
    # Of the document that goes on in the second half, if one does.
    begun = middle - bounds[at - 1] if bounds[at] > middle else 0
    own = (
        Half(0, at, (*bounds[:at], middle)),
        Half(at - (begun > 0), len(bounds) - 1, (middle, *bounds[at + (begun == 0) :]), begun),
    )
    halves = []
    for half in own:
        padding = -half.n_rows % multiple
        if not half.n_rows and not may_be_empty:
            padding = multiple
        halves.append(replace(half, padding=padding))
    return halves


def segments_of(
    bounds: Sequence[int], halves: Sequence[Half], ids: Iterator[int]
) -> list[list[Segment]]:
    """What each half of a microbatch holds, for a manifest.

    Args:
        bounds: as of :func:`cut`, which gave ``halves``.
        ids: of documents; one is taken for each.
    """
    lengths = [end - begin for begin, end in pairwise(bounds)]
    id_of = [next(ids) for _ in lengths]
    found = []
    for half in halves:
        held = list(enumerate(pairwise(half.bounds), half.first)) if half.n_rows else []
        segments = [
            Segment(id_of[i], lengths[i], half.begun if i == half.first else 0, end - begin)
            for i, (begin, end) in held
        ]
        if half.padding:
            segments.append(Segment(next(ids), half.padding, 0, half.padding))
        found.append(segments)
    return found


@dataclass(frozen=True)
class Layout:
    """Where tensors of a microbatch have its rows.

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
            return _narrowed(tensor, tensor.dim() - 1, half, fill)
        if half.first == half.last:
            return tensor.new_full((*tensor.shape[:-2], 1, half.padding), fill)
        return tensor.narrow(-2, half.first, half.last - half.first)

    def of_hidden(self, tensor: torch.Tensor, half: Half) -> torch.Tensor:
        """A half of hidden states ``[s, b, h]``, which a pipeline hands on; padding is 0."""
        if self.packed:
            return _narrowed(tensor, 0, half)
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
        first, *others = [
            output.narrow(dim, 0, half.n_rows if self.packed else half.last - half.first)
            for output, half in zip(outputs, halves, strict=True)
        ]
        # A half without rows stays part of the output, so that its backward pass is run.
        empty = first.narrow(dim, 0, 0).shape
        return torch.cat([first, *(o if o.numel() else o.reshape(empty) for o in others)], dim)


def _narrowed(tensor: torch.Tensor, dim: int, half: Half, fill: int = 0) -> torch.Tensor:
    own = tensor.narrow(dim, half.bounds[0], half.n_rows)
    if not half.padding:
        return own
    shape = [*own.shape]
    shape[dim] = half.padding
    return torch.cat([own, own.new_full(shape, fill)], dim)


def with_bounds(packed: Any, of: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """A copy of Megatron's ``PackedSeqParams`` with other bounds of documents. It is not made anew:
    what its ``__post_init__`` does waits for the GPU.

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
    """Megatron's ``PackedSeqParams`` of a half, found without waiting for a GPU.

    Raises:
        UnsupportedSetting: a field is given that says nothing of halves.
    """
    given = {name for name, value in vars(packed).items() if value is not None}
    if others := sorted(given - {*_OF_HALVES, *_AS_THEY_ARE}):
        raise UnsupportedSetting(
            f"packed_seq_params have {', '.join(others)}, of which it is not known how to cut it "
            "into the halves of a microbatch; leave it out, or open the steps with ping_pong=False"
        )

    def of_half(_: str, bounds: torch.Tensor) -> torch.Tensor:
        begin, end = half.bounds[0], half.bounds[-1]
        inner = bounds.flatten()[half.first : half.last + 1].clamp(begin, end) - begin
        return torch.cat([inner, inner[-1:] + half.padding][: 1 + bool(half.padding)])

    own = with_bounds(packed, of_half)
    for name in given & set(_LONGEST):
        setattr(own, name, half.longest)
    if "total_tokens" in given:
        own.total_tokens = half.n_rows + half.padding
    if "seq_idx" in given:
        index = packed.seq_idx.narrow(-1, half.bounds[0], half.n_rows) - half.first
        padding = index.new_full((*index.shape[:-1], half.padding), half.last - half.first)
        own.seq_idx = torch.cat([index, padding], -1)
    if "tokens_per_sample" in given:
        # Halves do not hold whole samples.
        own.tokens_per_sample = None
    return own
