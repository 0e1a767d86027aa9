"""Packing fills every row once, agrees over ranks, and can start at any step."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from core_attention.arrays import Int64Array
from distca.apps.train.corpus import Corpus
from distca.apps.train.packing import IGNORED_LABEL, Packer, batch_of, predicted_tokens

LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=12)
RANKS, TOKENS = st.integers(1, 4), st.integers(2, 64)
LIMITS = st.none() | st.integers(2, 40)
CPU = torch.device("cpu")


class Texts(Corpus):
    """Documents that are no files."""

    def __init__(self, texts: list[Int64Array]) -> None:
        self._texts = texts
        self.lengths = np.array([len(text) for text in texts])

    def tokens(self, document: int, begin: int, end: int) -> Int64Array:
        return self._texts[document][begin:end]


def corpus_of(lengths: list[int]) -> Corpus:
    random = np.random.default_rng(7)
    return Texts([random.integers(0, 256, length) for length in lengths])


@given(lengths=LENGTHS, n_ranks=RANKS, tokens=TOKENS, limit=LIMITS)
def test_an_epoch_holds_every_token_of_the_corpus_once(
    lengths: list[int], n_ranks: int, tokens: int, limit: int | None
) -> None:
    packer = Packer(np.array(lengths), n_ranks, tokens, seed=3, max_document_tokens=limit)
    total = sum(lengths)
    seen = [np.zeros(length, dtype=int) for length in lengths]
    for step in range(-(-total // (n_ranks * tokens))):
        rows = packer.pack(step)
        assert [sum(document.length for document in row) for row in rows] == [tokens] * n_ranks
        for document in (document for row in rows for document in row):
            assert document.length <= packer.limit
            taken = min(document.length, total)
            seen[document.source][document.begin : document.begin + taken] += 1
            total -= taken
    assert all((counts == 1).all() for counts in seen)


@given(lengths=LENGTHS, n_ranks=RANKS, tokens=TOKENS, step=st.integers(0, 9), limit=LIMITS)
def test_batches_carry_the_documents_tokens_positions_and_labels(
    lengths: list[int], n_ranks: int, tokens: int, step: int, limit: int | None
) -> None:
    corpus = corpus_of(lengths)
    packer = Packer(corpus.lengths, n_ranks, tokens, seed=3, max_document_tokens=limit)
    for documents in packer.pack(step):
        batch = batch_of(corpus, documents, CPU)
        each_length = [document.length for document in documents]
        columns = (column[0].split(each_length) for column in batch.values())
        for document, ids, positions, labels in zip(documents, *columns, strict=True):
            end = document.begin + document.length
            expected = corpus.tokens(document.source, document.begin, end).tolist()
            assert ids.tolist() == expected
            assert positions.tolist() == list(range(document.length))
            assert labels.tolist() == [IGNORED_LABEL, *expected[1:]]
        assert int((batch["labels"] != IGNORED_LABEL).sum()) == predicted_tokens(documents)


def test_order_depends_on_seed_and_epoch() -> None:
    def order(seed: int, step: int) -> list[int]:
        (row,) = Packer(np.full(32, 8), 1, 256, seed=seed).pack(step)
        return [document.source for document in row]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != order(0, 1)
    assert sorted(order(0, 1)) == list(range(32))
