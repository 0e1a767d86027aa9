"""Packing: which documents every rank holds in a step, a pure function of (seed, step).

The pieces of the corpus, shuffled again in every epoch, form one endless stream of tokens. Step k
takes the next ``n_ranks * tokens_per_rank`` of them, so any step can be packed without those before
it, and all ranks agree on the documents of all ranks. A document that reaches the end of a rank's
row is cut there; the rest is a document of its own on the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from core_attention.arrays import Int64Array, exclusive_cumsum, runs_to_rows
from distca.apps.train.corpus import Corpus

IGNORED_LABEL = -100
"""Marks a token that nothing predicts; transformers' losses leave it out."""


class Document(NamedTuple):
    """A document of a step: ``length`` tokens of a corpus's document ``source`` from ``begin``."""

    source: int
    begin: int
    length: int


class Packer:
    """Packs the documents of a corpus into steps.

    Args:
        lengths: ``[n_documents]`` tokens of the corpus's documents.
        n_ranks: rows of a step, one a rank.
        tokens_per_rank: of each row.
        seed: of the shuffle.
        max_document_tokens: longer documents are cut into pieces of at most this many tokens; None:
            those of a row.
    """

    def __init__(
        self,
        lengths: Int64Array,
        n_ranks: int,
        tokens_per_rank: int,
        *,
        seed: int,
        max_document_tokens: int | None = None,
    ) -> None:
        self._n_ranks, self._tokens_per_rank, self._seed = n_ranks, tokens_per_rank, seed
        self.limit = min(max_document_tokens or tokens_per_rank, tokens_per_rank)
        """Tokens that a document has at most."""
        counts = -(-lengths // self.limit)
        self._source = np.repeat(np.arange(len(lengths)), counts)
        self._begin = runs_to_rows(np.zeros_like(counts), counts) * self.limit
        self._length = np.minimum(self.limit, lengths[self._source] - self._begin)
        self._epoch_tokens = int(self._length.sum())
        self._epoch_order = lru_cache(maxsize=2)(self._shuffle)

    def pack(self, step: int) -> list[list[Document]]:
        """The documents of each rank, in order."""
        first = step * self._n_ranks * self._tokens_per_rank
        return [self._row(first + rank * self._tokens_per_rank) for rank in range(self._n_ranks)]

    def _row(self, begin: int) -> list[Document]:
        """The documents in a row that begins at ``begin`` of the stream."""
        found, end = [], begin + self._tokens_per_rank
        while begin < end:
            epoch, at = divmod(begin, self._epoch_tokens)
            order, starts = self._epoch_order(epoch)
            index = int(np.searchsorted(starts, at, side="right")) - 1
            piece, skipped = order[index], at - int(starts[index])
            taken = min(int(self._length[piece]) - skipped, end - begin)
            source, first = int(self._source[piece]), int(self._begin[piece])
            found.append(Document(source, first + skipped, taken))
            begin += taken
        return found

    def _shuffle(self, epoch: int) -> tuple[Int64Array, Int64Array]:
        """The pieces in the order of an epoch, and where each begins in it."""
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._length))
        return order, exclusive_cumsum(self._length[order])


def predicted_tokens(documents: Sequence[Document]) -> int:
    """How many tokens are predicted: all but each document's first."""
    return sum(document.length - 1 for document in documents)


def batch_of(
    corpus: Corpus, documents: Sequence[Document], device: torch.device
) -> dict[str, torch.Tensor]:
    """A model's arguments for one packed row: ``input_ids``, ``position_ids`` that restart at 0 in
    each document, and ``labels``, all ``[1, n_tokens]``."""
    tokens = np.concatenate(
        [corpus.tokens(source, begin, begin + length) for source, begin, length in documents]
    )
    positions = np.concatenate([np.arange(document.length) for document in documents])
    labels = np.where(positions == 0, IGNORED_LABEL, tokens)
    columns = {"input_ids": tokens, "position_ids": positions, "labels": labels}
    return {name: torch.from_numpy(column[None]).to(device) for name, column in columns.items()}
