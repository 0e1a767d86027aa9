"""Parts of a packed row that take turns: where it is cut, what each holds, and tensors of one.

Rows, microbatches and batches are all cut so; only where in a tensor the rows are differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_map

from core_attention.manifest import Segment


@dataclass(frozen=True)
class RowPart:
    """Neighbouring rows ``[begin, end)`` of a packed row, and a document of padding after them
    whose outputs are dropped.

    Attributes:
        padding: tokens of it; 0 if there is none.
    """

    begin: int
    end: int
    padding: int = 0

    @property
    def n_rows(self) -> int:
        """Without padding."""
        return self.end - self.begin

    def of(self, tensor: torch.Tensor, dim: int, fill: int = 0) -> torch.Tensor:
        """This part of a tensor with the whole row in its dimension ``dim``; padding is ``fill``.
        Of a row ``[1, tokens, ...]`` with the strides of a row of its own: code that was compiled
        for one is not compiled again for another."""
        own = tensor.narrow(dim, self.begin, self.n_rows)
        if self.padding:
            shape = [*own.shape]
            shape[dim] = self.padding
            return torch.cat([own, own.new_full(shape, fill)], dim)
        return own.squeeze(0).unsqueeze(0) if dim == 1 and len(own) == 1 else own


def neighbours(sizes: Sequence[int]) -> list[RowPart]:
    """Parts of so many rows, one after another."""
    return [RowPart(*rows) for rows in pairwise(accumulate(sizes, initial=0))]


def cut(
    lengths: Sequence[int],
    n_parts: int,
    *,
    multiple: int = 1,
    inside_documents: bool,
    may_be_empty: bool = True,
) -> list[RowPart]:
    """Cuts a packed row into parts of equally many rows; if documents stay whole, of nearly
    equally many.

    Args:
        lengths: tokens of each document.
        n_parts: how many.
        multiple: what the rows of a part must be divided by, without rest (sequence parallelism);
            padding sees to it.
        inside_documents: whether a document may begin in one part and go on in the next.
        may_be_empty: whether the last parts of a row that cannot be divided may have no rows. If
            not, they have ``multiple`` tokens of padding: other ranks await them in collectives, or
            the model runs no empty batch.
    """
    n_rows = sum(lengths)
    if inside_documents:
        shares = (-(-n_rows * part // (n_parts * multiple)) for part in range(1, n_parts))
        ends = [*(min(share * multiple, n_rows) for share in shares), n_rows]
        sizes = [end - begin for begin, end in pairwise([0, *ends])]
    else:
        sizes = [sum(held) for held in split_documents(lengths, n_parts)]
    least = 0 if may_be_empty else multiple
    return [
        RowPart(part.begin, part.end, -part.n_rows % multiple if part.n_rows else least)
        for part in neighbours(sizes)
    ]


def split_documents(lengths: Sequence[int], n_parts: int) -> list[list[int]]:
    """Documents of one packed row in order, as ``n_parts`` nano-batches of nearly equal tokens.

    Args:
        lengths: tokens of each document.
        n_parts: nano-batches; those that nothing is left for are empty, the last ones.
    """
    parts: list[list[int]] = [[]]
    taken, total = 0, sum(lengths)
    for length in lengths:
        # A document goes where its middle lies; none is cut, and no part but the last ones is
        # empty.
        part = int((taken + length / 2) * n_parts / total)
        if part >= len(parts) and parts[-1] and len(parts) < n_parts:
            parts.append([])
        parts[-1].append(length)
        taken += length
    return parts + [[] for _ in range(n_parts - len(parts))]


def segments_of(
    lengths: Sequence[int], parts: Sequence[RowPart], ids: Iterator[int]
) -> list[list[Segment]]:
    """The documents of each part, for a manifest; those that reach over its end are cut there.

    Args:
        lengths: tokens of each document of the row.
        parts: all of the row.
        ids: of documents; one is taken for each, then one for each padding.
    """
    held: list[list[Segment]] = [[] for _ in parts]
    begin = 0
    for length in lengths:
        document = next(ids)
        for segments, part in zip(held, parts, strict=True):
            low, high = max(begin, part.begin), min(begin + length, part.end)
            if low < high:
                segments.append(Segment(document, length, low - begin, high - low))
        begin += length
    for segments, part in zip(held, parts, strict=True):
        if part.padding:
            segments.append(Segment(next(ids), part.padding, 0, part.padding))
    return held


def joined(outputs: Sequence[Any], join: Callable[[Sequence[Any]], Any]) -> Any:
    """Outputs of parts as one: what ``join`` makes of the leaves, in the containers of the first
    output."""
    return tree_map(lambda *leaves: join(leaves), *outputs)


def rows_joined(
    outputs: Sequence[torch.Tensor], parts: Sequence[RowPart], dim: int
) -> torch.Tensor:
    """Tensors of all parts, without padding, as one with the whole row in dimension ``dim``."""
    own = (each.narrow(dim, 0, part.n_rows) for each, part in zip(outputs, parts, strict=True))
    return torch.cat(list(own), dim)
