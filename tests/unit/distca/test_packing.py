"""Packing fills every row once, agrees over ranks, and can start at any step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core_attention.manifest import Manifest
from distca.apps.data.batch import IGNORED_LABEL, TokenBatch, rank_batches, whole_documents
from distca.apps.data.corpus import MemoryCorpus
from distca.apps.data.packing import BatchShape, PackedStep, Packer

LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=12)
SHAPES = st.builds(
    BatchShape,
    n_ranks=st.integers(1, 4),
    n_nano_batches=st.integers(1, 3),
    nano_batch_tokens=st.integers(2, 64),
    span_ranks=st.booleans(),
) | st.builds(
    BatchShape,
    n_ranks=st.integers(1, 4),
    n_nano_batches=st.sampled_from([2, 4]),
    nano_batch_tokens=st.integers(2, 64),
    span_ranks=st.booleans(),
    cut_documents=st.just(True),
)
LIMITS = st.none() | st.integers(2, 40)


def corpus_of(lengths: list[int]) -> MemoryCorpus:
    random = np.random.default_rng(7)
    letters = [random.integers(0, 128, length, dtype=np.uint8) for length in lengths]
    return MemoryCorpus("made up", [text.tobytes().decode() for text in letters])


def pack(corpus: MemoryCorpus, shape: BatchShape, step: int, limit: int | None) -> PackedStep:
    return Packer(corpus.lengths, shape, seed=3, max_document_tokens=limit).pack(step)


@given(lengths=LENGTHS, shape=SHAPES, step=st.integers(0, 50), limit=LIMITS)
def test_manifests_of_all_ranks_merge_and_fill_every_row(
    lengths: list[int], shape: BatchShape, step: int, limit: int | None
) -> None:
    packed = pack(corpus_of(lengths), shape, step, limit)
    ranks = range(shape.n_ranks)
    manifest = Manifest.merge([packed.rank_manifest(rank) for rank in ranks], shape.n_ranks)
    assert manifest.step == step
    for nano_batch in range(shape.n_nano_batches):
        assert (manifest.tokens_per_rank(nano_batch) == shape.nano_batch_tokens).all()
    if limit is not None:
        assert manifest.document_length.max() <= limit
    if not shape.span_ranks:
        # The parts of a document that is cut between nano-batches are on one rank.
        assert manifest.n_segments == manifest.n_documents
        assert (manifest.carried_rank == manifest.segment_rank[manifest.carried_document]).all()
    if not shape.cut_documents:
        assert manifest.n_carried == 0


@given(lengths=LENGTHS, shape=SHAPES, limit=LIMITS)
def test_an_epoch_holds_every_token_of_the_corpus_once(
    lengths: list[int], shape: BatchShape, limit: int | None
) -> None:
    corpus = corpus_of(lengths)
    total = sum(lengths)
    seen = [np.zeros(length, dtype=int) for length in lengths]
    for step in range(-(-total // shape.step_tokens)):
        for document in pack(corpus, shape, step, limit).documents:
            taken = min(document.length, total)
            begin = document.source_begin
            seen[document.source][begin : begin + taken] += 1
            total -= taken
    assert all((counts == 1).all() for counts in seen)


@given(lengths=LENGTHS, shape=SHAPES, step=st.integers(0, 9), limit=LIMITS)
def test_batches_carry_the_documents_tokens_positions_and_labels(
    lengths: list[int], shape: BatchShape, step: int, limit: int | None
) -> None:
    corpus = corpus_of(lengths)
    packed = pack(corpus, shape, step, limit)
    batches = [rank_batches(packed, corpus, rank) for rank in range(shape.n_ranks)]
    wholes: list[TokenBatch] = [
        batch for rank in range(shape.n_ranks) for batch in whole_documents(packed, corpus, rank)
    ]
    assert len(wholes) == len(packed.documents)
    predicted = 0
    row = np.zeros((shape.n_ranks, shape.n_nano_batches), dtype=int)
    by_first_rank = sorted(packed.documents, key=lambda document: document.segments[0].rank)
    for whole, document in zip(wholes, by_first_rank, strict=True):
        tokens = corpus.tokens(
            document.source, document.source_begin, document.source_begin + document.length
        )
        assert whole.input_ids[0].tolist() == tokens.tolist()
        assert whole.labels[0].tolist() == [*tokens[1:].tolist(), IGNORED_LABEL]
        predicted += int((whole.labels != IGNORED_LABEL).sum())
    assert predicted == packed.predicted_tokens
    whole_of = {
        document.document_id: whole for whole, document in zip(wholes, by_first_rank, strict=True)
    }
    for document in packed.documents:
        for nano_batch, rank, offset, length in document.segments:
            batch = batches[rank][nano_batch]
            begin = row[rank, nano_batch]
            for name in ("input_ids", "position_ids", "labels"):
                piece = getattr(batch, name)[:, begin : begin + length]
                expected = getattr(whole_of[document.document_id], name)
                assert torch.equal(piece, expected[:, offset : offset + length])
            row[rank, nano_batch] += length
    assert (row == shape.nano_batch_tokens).all()


def test_a_document_over_all_ranks_is_one_document_when_it_may_span() -> None:
    corpus = corpus_of([400])
    shape = BatchShape(n_ranks=4, n_nano_batches=1, nano_batch_tokens=100, span_ranks=True)
    (document,) = pack(corpus, shape, 0, None).documents
    assert document.segments == tuple((0, rank, 100 * rank, 100) for rank in range(4))
    pieces = pack(corpus, replace(shape, span_ranks=False), 0, None).documents
    assert [piece.length for piece in pieces] == [100, 100, 100, 100]


def test_a_document_over_both_nano_batches_is_one_document_when_it_may_be_cut() -> None:
    corpus = corpus_of([400])
    shape = BatchShape(n_ranks=2, n_nano_batches=2, nano_batch_tokens=100, cut_documents=True)
    pieces = pack(corpus, shape, 0, None).documents
    assert [piece.segments for piece in pieces] == [
        ((0, rank, 0, 100), (1, rank, 100, 100)) for rank in range(2)
    ]
    (document,) = pack(corpus, replace(shape, span_ranks=True), 0, None).documents
    assert document.segments == (
        (0, 0, 0, 100),
        (0, 1, 100, 100),
        (1, 0, 200, 100),
        (1, 1, 300, 100),
    )
    # Of two microbatches, each has a pair of its own.
    pieces = pack(corpus, replace(shape, n_nano_batches=4), 0, None).documents
    assert [piece.segments for piece in pieces] == [
        ((2 * pair, rank, 0, 100), (2 * pair + 1, rank, 100, 100))
        for pair in range(2)
        for rank in range(2)
    ]
    for n_nano_batches in (1, 3):
        refusal = rf"cut_documents: .* there are {n_nano_batches}; set nano_batches to 2"
        with pytest.raises(ValueError, match=refusal):
            replace(shape, n_nano_batches=n_nano_batches)


def test_order_depends_on_seed_and_epoch() -> None:
    corpus = corpus_of([8] * 32)
    shape = BatchShape(n_ranks=1, n_nano_batches=1, nano_batch_tokens=256)

    def order(seed: int, step: int) -> list[int]:
        packed = Packer(corpus.lengths, shape, seed=seed).pack(step)
        return [document.source for document in packed.documents]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != order(0, 1)
    assert sorted(order(0, 1)) == list(range(32))


def test_documents_over_the_limit_are_reported() -> None:
    corpus = corpus_of([10, 90, 20, 41])
    shape = BatchShape(n_ranks=1, n_nano_batches=1, nano_batch_tokens=64)
    packer = Packer(corpus.lengths, shape, seed=0, max_document_tokens=40)
    assert packer.cut_documents.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("field", "value"), [("n_ranks", 0), ("n_nano_batches", 0), ("nano_batch_tokens", 1)]
)
def test_batch_shape_names_a_bad_field(field: str, value: int) -> None:
    sizes: dict[str, Any] = {"n_ranks": 1, "n_nano_batches": 1, "nano_batch_tokens": 8}
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        BatchShape(**(sizes | {field: value}))
