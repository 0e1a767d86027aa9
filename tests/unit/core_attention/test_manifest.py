"""Manifests: merging what ranks send, and refusing what breaks an invariant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from core_attention.errors import ManifestError
from core_attention.manifest import Manifest, RankManifest, Segment
from tests.support.cut_manifests import pieces
from tests.support.errors import refused
from tests.support.plan_slices import restrict
from tests.support.strategies import manifests, rank_manifests


def two_ranks() -> list[RankManifest]:
    """Document 7 goes from rank 0 to rank 1 and back to rank 0; 8 and 9 are whole."""
    return [
        RankManifest(
            step=5,
            rank=0,
            nano_batches=(
                (Segment(7, 10, 0, 4), Segment(7, 10, 9, 1)),
                (Segment(9, 1, 0, 1),),
            ),
        ),
        RankManifest(5, 1, ((Segment(8, 3, 0, 3), Segment(7, 10, 4, 5)), ())),
    ]


def test_from_lengths_makes_ids_unique_across_ranks() -> None:
    ranks = [RankManifest.from_lengths(0, rank, [[3, 1], [2]]) for rank in range(3)]
    assert ranks[2].tokens(0) == 4
    manifest = Manifest.merge(ranks, 3)
    assert manifest.n_documents == 9
    assert manifest.tokens_per_rank(1).tolist() == [2, 2, 2]


def rank_zero(*segments: Segment, step: int = 5, rank: int = 0) -> RankManifest:
    return RankManifest(step, rank, (segments,))


@pytest.mark.parametrize(
    ("ranks", "n_ranks"),
    [
        ([], 1),
        ([rank_zero(Segment(1, 1, 0, 1))], 3),
        ([rank_zero(Segment(1, 1, 0, 1), rank=4)], 2),
        ([rank_zero(Segment(1, 1, 0, 1))] * 2, 1),
        ([rank_zero(Segment(1, 1, 0, 1)), rank_zero(Segment(2, 1, 0, 1), rank=1, step=6)], 2),
        ([rank_zero(Segment(1, 1, 0, 1)), RankManifest(5, 1, ((), ()))], 2),
        ([rank_zero()], 1),
        (pieces("1:0-0/0"), 1),
        (pieces(f"1:0-{2**31}/{2**31}"), 1),
        (pieces("3:0-2/2 3:2-2/2"), 1),
        (pieces("3:0-2/4 3:3-4/4"), 1),
        (pieces("3:0-2/4 3:1-4/4"), 1),
        (pieces("3:1-4/4"), 1),
        (pieces("3:0-3/4"), 1),
        (pieces("3:0-1/2 3:1-2/3"), 1),
        (pieces("3:0-1/2 | 3:1-2/2 |"), 1),
        (pieces("| 3:0-1/2 | 3:1-2/2 |"), 1),
        (pieces("3:0-1/2 | | | 3:1-2/2"), 1),
        (pieces("| | 3:0-1/2 |", "| | | 3:1-2/2"), 2),
        (pieces("3:1-2/2 | 3:0-1/2"), 1),
        (pieces("3:0-2/2 | 3:0-2/2"), 1),
        (pieces("3:0-1/3 | 3:1-2/3"), 1),
        (pieces("3:0-1/2 |", "4:0-1/1 | 3:1-2/2"), 2),
        # Trees.
        (pieces("1:0-4/4 2:5-6/6<1@5"), 1),
        (pieces("1:0-4/4 2:4-4/4<1@4"), 1),
        (pieces("1:0-4/4 2:1-3/3<9@1"), 1),
        (pieces("1:2-4/4<2@2 2:2-4/4<1@2"), 1),
        (pieces("1:0-4/4 2:2-3/4<1@2 2:3-4/4<1@1"), 1),
        (pieces("2:4-6/6<1@4 | 1:0-4/4"), 1),
        (pieces("1:0-4/4 | | 2:4-6/6<1@4 |"), 1),
    ],
)
def test_a_broken_invariant_is_an_error(ranks: list[RankManifest], n_ranks: int) -> None:
    with pytest.raises(ManifestError):
        Manifest.merge(ranks, n_ranks)


def test_a_branch_carries_its_path() -> None:
    """Document 3 branches off 2, which branches off 1, and 4 is in the other nano-batch."""
    manifest = Manifest.merge(
        pieces(
            "1:0-4/4 2:3-8/8<1@3 | 9:0-1/1 4:4-6/6<1@4 5:2-3/3<1@2",
            "3:6-7/7<2@6 | 8:0-2/2",
        ),
        2,
    )
    assert manifest.document_id.tolist() == [1, 2, 3, 4, 5, 8, 9]
    assert manifest.document_begin.tolist() == [0, 3, 6, 4, 2, 0, 0]
    assert manifest.carried_document.tolist() == [1, 2, 2, 3, 4]
    assert manifest.carried_offset.tolist() == [0, 0, 3, 0, 0]
    assert manifest.carried_length.tolist() == [3, 3, 3, 4, 2]
    assert manifest.carried_row.tolist() == [0, 0, 4, 4, 4]
    assert manifest.carried_origin.tolist() == [-1, -1, -1, 0, 0]
    assert list(manifest.handed_over(0)) == [(1, 0, 4)]
    assert manifest.n_texts == 7


@pytest.mark.parametrize(
    "segment",
    [Segment(1, 2**70, 0, 1), Segment(2**63, 1, 0, 1), Segment(1, 2, 0, 1.5)],  # type: ignore[arg-type]
)
def test_values_that_are_no_64_bit_integers_are_refused(segment: Segment) -> None:
    with pytest.raises(ManifestError):
        rank_zero(Segment(7, 1, 0, 1), segment)


@pytest.mark.parametrize("kind", [np.int32, np.uint64, torch.tensor])
def test_integers_of_other_libraries_are_integers(kind: Callable[[int], int]) -> None:
    other = Segment(*map(kind, (7, 5, 0, 5)))
    assert rank_zero(other) == rank_zero(Segment(7, 5, 0, 5))
    assert rank_zero(other).nano_batches == ((Segment(7, 5, 0, 5),),)


def test_manifests_of_columns_equal_those_of_segments() -> None:
    made = RankManifest(
        5, 1, ((Segment(8, 3, 0, 3), Segment(7, 10, 4, 5)), (), (Segment(9, 2, 0, 2),))
    )
    again = RankManifest.from_columns(5, 1, 3, made.columns)
    assert again == made
    assert again.fingerprint == made.fingerprint == hash(made)
    assert again.nano_batches == made.nano_batches
    assert repr(again) == repr(made)
    for other in (
        RankManifest(6, 1, made.nano_batches),
        RankManifest(5, 0, made.nano_batches),
        RankManifest(5, 1, made.nano_batches[:2]),
        RankManifest(5, 1, (*made.nano_batches, ())),
        RankManifest(5, 1, made.nano_batches[::-1]),
        RankManifest(5, 1, (made.nano_batches[0][::-1], *made.nano_batches[1:])),
    ):
        assert other != made
        assert other.fingerprint != made.fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"n_ranks": 1},
        {"n_nano_batches": 1},
        {"segment_document": [0, 0, 0, 1, 3]},
        {"segment_document": [1, 0, 0, 0, 2]},
        {"document_id": [8, 7, 9]},
        {"segment_document": [0, 0, 0, 1, 1]},
        {"segment_row": [0, 3, 5, 0, 0]},
        {"segment_row": [0, 2, 4, 0, 0]},
        {"segment_row": [0, 3, 4, 0, 1]},
        {"segment_length": [4, 5, 1, 3]},
        {"segment_row": np.zeros(5)},
    ],
)
def test_columns_are_checked(changes: dict[str, Any]) -> None:
    with refused():
        replace(Manifest.merge(two_ranks(), 2), **changes)


@given(rank_manifests())
def test_merge_keeps_every_row_in_its_place(ranks: list[RankManifest]) -> None:
    manifest = Manifest.merge(ranks, len(ranks))
    for rank_manifest in ranks:
        for nano, segments in enumerate(rank_manifest.nano_batches):
            row = 0
            for segment in segments:
                (document,) = np.flatnonzero(
                    (manifest.document_id == segment.document_id)
                    & (manifest.document_nano_batch == nano)
                )
                (at,) = np.flatnonzero(
                    (manifest.segment_document == document)
                    & (manifest.segment_offset == segment.offset)
                )
                assert manifest.segment_rank[at] == rank_manifest.rank
                assert manifest.segment_row[at] == row
                row += segment.length
            assert manifest.tokens_per_rank(nano)[rank_manifest.rank] == row
            assert rank_manifest.tokens(nano) == row


def test_every_pair_of_nano_batches_cuts_documents_of_its_own() -> None:
    """Document 7 is in nano-batches 0 and 1, document 8 in 2 and 3, both of two ranks."""
    ranks = pieces(
        "7:0-3/9 | 7:5-7/9 9:0-1/1 | 8:0-1/6 | 8:4-6/6",
        "7:3-5/9 | 7:7-9/9 | 8:1-4/6 | 10:0-4/4",
    )
    manifest = Manifest.merge(ranks, 2)
    assert manifest.document_id.tolist() == [7, 7, 9, 8, 8, 10]
    assert manifest.document_length.tolist() == [5, 9, 1, 4, 6, 4]
    assert manifest.document_begin.tolist() == [0, 5, 0, 0, 4, 0]
    assert manifest.n_texts == 4
    assert manifest.carried_document.tolist() == [1, 1, 4, 4]
    assert manifest.carried_offset.tolist() == [0, 3, 0, 1]
    assert manifest.carried_length.tolist() == [3, 2, 1, 3]
    assert manifest.carried_rank.tolist() == [0, 1, 0, 1]
    assert manifest.carried_row.tolist() == [3, 2, 2, 4]
    with pytest.raises(ManifestError):
        replace(manifest, n_nano_batches=5)
    with pytest.raises(ManifestError):
        replace(manifest, n_nano_batches=6, document_nano_batch=np.array([0, 1, 1, 3, 4, 5]))


@given(manifests())
def test_carried_keys_are_those_of_the_first_part(manifest: Manifest) -> None:
    for document in np.flatnonzero(manifest.document_begin).tolist():
        (first,) = np.flatnonzero(
            (manifest.document_id == manifest.document_id[document])
            & (manifest.document_nano_batch == manifest.document_nano_batch[document] - 1)
        )
        mine, its = manifest.carried_document == document, manifest.segment_document == first
        for name in ("offset", "length", "rank"):
            carried, held = (getattr(manifest, f"{kind}_{name}") for kind in ("carried", "segment"))
            assert carried[mine].tolist() == held[its].tolist()


def test_carried_keys_without_a_first_part_are_refused() -> None:
    cut = Manifest.merge(pieces("3:0-1/2 | 3:1-2/2"), 1)
    second = restrict(cut, np.array([1]))
    with pytest.raises(ManifestError):
        replace(second, whole=True)
