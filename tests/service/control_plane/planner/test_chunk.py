"""The geometry of cuts, beside all cuts there are."""

from __future__ import annotations

import math

import pytest

from control_plane.planner.chunk import (
    ALIGNMENT_TOKENS,
    SHORTEST_TOKENS,
    CutRules,
    begin_for_pairs,
    best_end,
    cheapest_end,
    cut_rules,
    with_alignment,
    with_shorter_chunks,
)
from tests.service.control_plane.planner.compiled_calls import callable_from_python

RULES = cut_rules(0, q_bytes=8, kv_bytes=3, min_tokens=512, finest_alignment=16)
PAIRS = 3000.0


def bytes_of(begin: float, end: float, resident: int) -> float:
    return RULES.q_bytes * (end - begin) + RULES.kv_bytes * max(end - resident, 0.0)


def cheapest_of_all(low: int, high: int, resident: int) -> float:
    """The fewest bytes for PAIRS inside ``[low, high)``, over all ends."""
    costs = []
    for step in range(low * 100, high * 100 + 1):
        end = step / 100
        squared = end * end - 2 * PAIRS
        if squared >= low * low:
            costs.append(bytes_of(math.sqrt(squared), end, resident))
    return min(costs)


@pytest.mark.parametrize(
    ("low", "high", "resident"),
    [
        (0, 1000, 0),  # long enough: the middle of the document
        (0, 90, 0),  # it ends before the cheapest chunk does
        (150, 400, 0),  # it begins after the cheapest chunk does
        (0, 400, 300),  # the receiver has keys anyway
        (100, 400, 130),
        (0, 400, 60),  # so few that they change nothing
    ],
)
def test_no_chunk_of_as_many_pairs_moves_fewer_bytes(low: int, high: int, resident: int) -> None:
    find = callable_from_python(best_end)
    end = find(callable_from_python(cheapest_end)(RULES, PAIRS), low, high, resident, PAIRS)
    begin = callable_from_python(begin_for_pairs)(end, PAIRS)
    assert low - 1e-6 <= begin < end <= high
    assert (end**2 - begin**2) / 2 == pytest.approx(PAIRS)
    # The search goes in steps of a hundredth of a token.
    assert bytes_of(begin, end, resident) <= cheapest_of_all(low, high, resident) * (1 + 1e-4)


def test_the_beginning_of_a_document_has_only_so_many_pairs() -> None:
    assert callable_from_python(begin_for_pairs)(10.0, 51.0) == 0.0


def test_bounds_of_pairs_per_byte_hold_and_are_reached() -> None:
    most = max(
        (end**2 - begin**2) / 2 / bytes_of(begin, end, 0) / end
        for end in (100, 1000)
        for begin in range(end)
    )
    assert most == pytest.approx(RULES.peak, rel=1e-3)
    end = math.sqrt(2 * PAIRS / (1 - RULES.kappa**2))
    begin = RULES.kappa * end
    assert PAIRS / bytes_of(begin, end, 0) == pytest.approx(RULES.ideal * math.sqrt(PAIRS))


def test_cuts_get_finer_only_where_the_target_load_needs_it() -> None:
    finer = callable_from_python(with_alignment)
    longest = 1 << 17
    enough = ALIGNMENT_TOKENS * longest / 0.005
    assert finer(RULES, enough * 1.01, longest).alignment == ALIGNMENT_TOKENS
    assert finer(RULES, enough * 0.99, longest).alignment == ALIGNMENT_TOKENS // 2
    assert finer(RULES, 1.0, longest).alignment == RULES.finest_alignment


def test_chunks_get_as_short_as_rests_then_both_shrink_to_the_shortest() -> None:
    shorter = callable_from_python(with_shorter_chunks)
    seen: list[tuple[int, int]] = []
    rules: CutRules = RULES
    for _ in range(4):
        rules = CutRules(*shorter(rules))
        seen.append((rules.min_tokens, rules.min_rest_tokens))
    assert seen == [(256, 256), (128, 128), (SHORTEST_TOKENS,) * 2, (SHORTEST_TOKENS,) * 2]
