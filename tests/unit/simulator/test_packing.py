"""Plain packing and the lengths it takes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from core_attention.manifest import Manifest
from distca.apps.simulator.packing import (
    pack_in_order,
    rank_manifests,
    split_long,
    take_steps,
)
from tests.support.errors import refused


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=30),
    st.integers(1, 5),
    st.integers(1, 2),
)
def test_every_rank_and_nano_batch_gets_its_tokens(
    lengths: list[int], n_ranks: int, n_nano_batches: int
) -> None:
    rows = -(-sum(lengths) // (n_ranks * n_nano_batches))
    missing = rows * n_ranks * n_nano_batches - sum(lengths)
    filled = np.array(lengths + [missing] * bool(missing))
    manifest = pack_in_order(filled, n_ranks, rows * n_nano_batches, n_nano_batches)
    for nano_batch in range(n_nano_batches):
        assert (manifest.tokens_per_rank(nano_batch) == rows).all()


def test_a_document_goes_on_with_the_next_rank_and_is_cut_at_a_nano_batch() -> None:
    manifest = pack_in_order(np.array([6, 10]), n_ranks=2, tokens_per_rank=8, n_nano_batches=2)
    assert manifest.document_length.tolist() == [6, 2, 8]
    assert manifest.segment_rank.tolist() == [0, 1, 1, 0, 1]
    assert manifest.segment_offset.tolist() == [0, 4, 0, 0, 4]
    assert manifest.segment_row.tolist() == [0, 0, 2, 0, 0]


def test_manifests_of_ranks_merge_to_the_manifest_again() -> None:
    manifest = pack_in_order(
        np.array([6, 9, 3, 30]), n_ranks=3, tokens_per_rank=16, n_nano_batches=2
    )
    merged = Manifest.merge(rank_manifests(manifest), 3)
    for column in ("document_length", "segment_offset", "segment_rank", "segment_row"):
        assert (getattr(merged, column) == getattr(manifest, column)).all()


def test_steps_take_documents_in_order_and_cut_the_last_one() -> None:
    steps = take_steps(np.array([5, 5, 5, 5]), n_steps=2, step_tokens=8)
    assert [step.tolist() for step in steps] == [[5, 3], [2, 5, 1]]


def test_too_few_tokens_are_refused() -> None:
    with refused():
        take_steps(np.array([9]), n_steps=2, step_tokens=8)


def test_long_documents_are_split() -> None:
    assert split_long(np.array([3, 10, 8]), 4).tolist() == [3, 4, 4, 2, 4, 4]
