"""Documents, packed: attention is causal inside a document and never crosses it.

A nano-batch lays documents of n_0, n_1, ... tokens one after another and gives each rank an equal
share of the rows, so a document may span ranks. Row numbers are the same in every process:

    row(d, i) = first_d + i,    first_d = n_0 + ... + n_{d-1},    0 <= i < n_d

The *home* of a row is the rank that holds it. A *segment* is a piece of a document on one rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch


@dataclass(frozen=True)
class NanoBatch:
    """Documents of all ranks that go through the model together.

    Attributes:
        lengths: tokens of each document, at least 1.
        n_ranks: ranks that share the rows, as evenly as can be.
    """

    lengths: tuple[int, ...]
    n_ranks: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def first(self) -> list[int]:
        """The first row of each document, and the end of the last."""
        return [*accumulate(self.lengths, initial=0)]

    def rows(self, rank: int) -> slice:
        """The rows whose home is ``rank``."""
        return slice(*(self.tokens * each // self.n_ranks for each in (rank, rank + 1)))

    def segments(self) -> Iterator[tuple[int, int, int, int]]:
        """(document, begin, end, home) of each: those of a document partition it."""
        for document, (first, end) in enumerate(pairwise(self.first)):
            for rank in range(self.n_ranks):
                rows = self.rows(rank)
                low, high = max(rows.start, first), min(rows.stop, end)
                if low < high:
                    yield document, low - first, high - first, rank


def two_lanes(lengths: Sequence[int], n_ranks: int) -> tuple[NanoBatch, NanoBatch]:
    """Deals documents out to two nano-batches; the second is empty if there is one document."""
    return NanoBatch(tuple(lengths[::2]), n_ranks), NanoBatch(tuple(lengths[1::2]), n_ranks)


def random_lengths(n_documents: int, median: int, longest: int, seed: int) -> list[int]:
    """Log-normal lengths, as of texts for pretraining: many short, few long."""
    drawn = torch.randn(n_documents, generator=torch.Generator().manual_seed(seed))
    return (median * drawn.mul(1.2).exp()).long().clamp(1, longest).tolist()
