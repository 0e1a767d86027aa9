"""Stretches of a lane in which the same documents take part."""

from __future__ import annotations

import numpy as np
import pytest

from core_attention.errors import PlanError
from core_attention.first_ticks import FirstTicks
from core_attention.manifest import Manifest, RankManifest


def step(*lengths: list[int]) -> Manifest:
    """Whole documents on one rank, by nano-batch."""
    return Manifest.merge([RankManifest.from_lengths(3, 0, lengths)], 1)


def test_without_first_ticks_all_documents_take_part_from_the_beginning() -> None:
    ticks = FirstTicks(step([4, 5], [6]))
    assert [ticks.stretch(0, index) for index in (0, 7)] == [0, 0]
    assert ticks.documents(0, 0).tolist() == [True, True, False]
    assert ticks.documents(1, 0).tolist() == [False, False, True]


def test_documents_join_their_lane_at_their_first_tick() -> None:
    ticks = FirstTicks(step([4, 5, 6], [7]), np.array([2, 5, 2, 0]))
    assert [ticks.stretch(0, index) for index in range(7)] == [-1, -1, 0, 0, 0, 1, 1]
    assert ticks.documents(0, 0).tolist() == [True, False, True, False]
    assert ticks.documents(0, 1).tolist() == [True, True, True, False]
    assert ticks.stretch(1, 0) == 0


def test_a_lane_without_documents_has_no_stretch() -> None:
    assert FirstTicks(step([4], [])).stretch(1, 3) == -1


@pytest.mark.parametrize("wrong", [[0], [0, 0, 0], [0, -1]])
def test_there_is_one_number_for_each_document(wrong: list[int]) -> None:
    with pytest.raises(PlanError):
        FirstTicks(step([4, 5]), np.array(wrong))
