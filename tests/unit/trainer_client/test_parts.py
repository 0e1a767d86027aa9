"""Where rows are cut into parts that take turns, and what each part holds."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core_attention.manifest import Manifest, RankManifest
from trainer_client.turns.parts import RowPart, cut, rows_joined, segments_of, split_documents


@pytest.mark.parametrize(
    ("lengths", "n_parts", "parts"),
    [
        ([5, 9], 2, [[5], [9]]),
        ([9, 5], 2, [[9], [5]]),
        ([1] * 6, 2, [[1] * 3, [1] * 3]),
        ([100, 1, 1], 2, [[100], [1, 1]]),
        ([1, 1, 100], 2, [[1, 1], [100]]),
        ([1, 100, 1], 3, [[1], [100], [1]]),
        ([7], 2, [[7], []]),
        ([], 2, [[], []]),
        ([2, 3, 1, 1], 1, [[2, 3, 1, 1]]),
    ],
)
def test_whole_documents_in_order_in_parts_of_nearly_equal_tokens(
    lengths: list[int], n_parts: int, parts: list[list[int]]
) -> None:
    assert split_documents(lengths, n_parts) == parts


@pytest.mark.parametrize(
    ("lengths", "multiple", "inside", "parts"),
    [
        ([3, 5, 4], 1, False, [RowPart(0, 8), RowPart(8, 12)]),
        ([3, 2, 7], 4, False, [RowPart(0, 5, 3), RowPart(5, 12, 1)]),
        ([12], 2, False, [RowPart(0, 12), RowPart(12, 12, 2)]),
        ([7], 1, True, [RowPart(0, 4), RowPart(4, 7)]),
        ([3, 7], 2, True, [RowPart(0, 6), RowPart(6, 10)]),
        ([20], 8, True, [RowPart(0, 16), RowPart(16, 20, 4)]),
        # Shorter than what two halves need: the other is padding.
        ([1], 1, True, [RowPart(0, 1), RowPart(1, 1, 1)]),
        ([3], 4, True, [RowPart(0, 3, 1), RowPart(3, 3, 4)]),
    ],
)
def test_halves(lengths: list[int], multiple: int, inside: bool, parts: list[RowPart]) -> None:
    def halves(*, may_be_empty: bool) -> list[RowPart]:
        return cut(
            lengths, 2, multiple=multiple, inside_documents=inside, may_be_empty=may_be_empty
        )

    assert halves(may_be_empty=False) == parts
    without = [part if part.n_rows else RowPart(part.begin, part.end) for part in parts]
    assert halves(may_be_empty=True) == without


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    multiple=st.integers(1, 4),
    inside=st.booleans(),
    n_parts=st.integers(1, 2),
)
def test_segments_are_the_rows_of_every_part(
    lengths: list[int], multiple: int, inside: bool, n_parts: int
) -> None:
    parts = cut(lengths, n_parts, multiple=multiple, inside_documents=inside, may_be_empty=False)
    sizes = [part.n_rows for part in parts]
    assert all((part.n_rows + part.padding) % multiple == 0 for part in parts)
    if inside and sum(lengths) % (n_parts * multiple) == 0:
        assert len(set(sizes)) == 1
        assert not any(part.padding for part in parts)
    held = segments_of(lengths, parts, count(50))
    assert all(held)
    row = torch.cat([torch.arange(length) for length in lengths])[None]
    for segments, part in zip(held, parts, strict=True):
        positions = [s.offset + i for s in segments for i in range(s.length)]
        assert part.of(row, 1, fill=-1)[0].tolist() == [
            *positions[: part.n_rows],
            *[-1] * part.padding,
        ]
        assert positions[part.n_rows :] == list(range(part.padding))
    assert torch.equal(rows_joined([part.of(row, 1) for part in parts], parts, 1), row)
    manifest = Manifest.merge([RankManifest(0, 0, held)], 1)
    assert manifest.n_texts == len(lengths) + sum(part.padding > 0 for part in parts)
    assert inside or not manifest.n_carried


def test_a_part_of_a_row_has_the_strides_of_a_row_of_its_own() -> None:
    own = RowPart(2, 6).of(torch.arange(8)[None], 1)
    assert own.tolist() == [[2, 3, 4, 5]]
    assert own.stride() == torch.zeros(1, 4).stride()
