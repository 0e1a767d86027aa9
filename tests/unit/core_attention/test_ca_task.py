"""Task tables and the plan invariants that they carry."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from core_attention.ca_task import MaskKind, Phase, TaskTable, home_segment
from core_attention.errors import PlanError
from core_attention.manifest import Manifest, RankManifest, Segment
from core_attention.plan import Plan
from tests.support.strategies import plans


def manifest() -> Manifest:
    """Document 70 of 10 tokens: [0, 6) on rank 0, [6, 10) on rank 1; document 80 of 1 token."""
    return Manifest.merge(
        [
            RankManifest(0, 0, ((Segment(70, 10, 0, 6),),)),
            RankManifest(0, 1, ((Segment(80, 1, 0, 1), Segment(70, 10, 6, 4)),)),
        ],
        2,
    )


def table(*rows: tuple[int, int, int, int]) -> TaskTable:
    return TaskTable(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def test_accepts_a_partition_and_finds_homes() -> None:
    tasks = table((0, 0, 2, 1), (0, 2, 6, 0), (0, 6, 10, 1), (1, 0, 1, 0))
    tasks.check(manifest(), 2)
    assert home_segment(manifest(), tasks).tolist() == [0, 0, 1, 2]
    assert len(tasks) == 4


def test_counts_causal_pairs() -> None:
    tasks = table((0, 0, 4, 0), (0, 4, 6, 0))
    assert tasks.qk_pairs(manifest()).tolist() == [1 + 2 + 3 + 4, 5 + 6]


def test_under_the_full_mask_every_query_sees_all_keys() -> None:
    tasks = replace(table((0, 0, 4, 0), (0, 4, 10, 0), (1, 0, 1, 0)), mask=MaskKind.FULL)
    assert tasks.k_end(manifest()).tolist() == [10, 10, 1]
    assert tasks.qk_pairs(manifest()).tolist() == [4 * 10, 6 * 10, 1]


@pytest.mark.parametrize(
    "tasks",
    [
        table((0, 0, 6, 0), (0, 6, 10, 2), (1, 0, 1, 0)),
        table((0, 0, 6, -1), (0, 6, 10, 0), (1, 0, 1, 0)),
        table((1, 0, 1, 0), (0, 0, 6, 0), (0, 6, 10, 0)),
        table((0, 0, 6, 0), (0, 6, 10, 0), (1, 0, 1, 0), (2, 0, 1, 0)),
        table((0, 0, 6, 0), (0, 6, 10, 0)),
        table(),
        table((0, 1, 6, 0), (0, 6, 10, 0), (1, 0, 1, 0)),
        table((0, 0, 5, 0), (0, 6, 10, 0), (1, 0, 1, 0)),
        table((0, 0, 6, 0), (0, 5, 10, 0), (1, 0, 1, 0)),
        table((0, 0, 6, 0), (0, 6, 9, 0), (1, 0, 1, 0)),
        table((0, 0, 6, 0), (0, 6, 11, 0), (1, 0, 1, 0)),
        table((0, 0, 6, 0), (0, 6, 6, 0), (0, 6, 10, 0), (1, 0, 1, 0)),
        table((0, 0, 7, 0), (0, 7, 10, 0), (1, 0, 1, 0)),
    ],
)
def test_a_broken_invariant_is_an_error(tasks: TaskTable) -> None:
    with pytest.raises(PlanError):
        tasks.check(manifest(), 2)


def test_columns_of_different_lengths_are_refused() -> None:
    zero = np.zeros(1, dtype=np.int64)
    with pytest.raises(PlanError):
        TaskTable(zero, zero, zero, np.zeros(2, dtype=np.int64))


@given(plans())
def test_tasks_count_every_pair_of_every_document_once(plan: Plan) -> None:
    length = plan.manifest.document_length
    forward, backward = (plan.tasks(phase).qk_pairs(plan.manifest) for phase in Phase)
    begin = plan.manifest.document_begin
    pairs = (length * (length + 1) // 2 - begin * (begin + 1) // 2).sum()
    assert forward.sum() == backward.sum() == pairs
