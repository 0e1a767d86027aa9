"""In which order ranks of pipelines come to their ticks, and which of them they have at all."""

from __future__ import annotations

import pytest

from core_attention.ca_task import Phase
from core_attention.first_ticks import FirstTicks
from core_attention.manifest import Manifest, RankManifest
from core_attention.pipelining import Pipelining
from core_attention.schedule_orders import SCHEDULES
from core_attention.tick import Tick
from core_attention.tick_order import Turn, tick_order


def pipelining(name: str, n_ranks: int, n_microbatches: int, layers: list[int]) -> Pipelining:
    return Pipelining(
        schedule=SCHEDULES[name](n_ranks, n_microbatches),
        pipeline_ranks=list(range(n_ranks)),
        layers=layers,
        forward_seconds=[1.0] * len(layers),
        backward_seconds=[2.0] * len(layers),
    )


def test_a_rank_comes_to_its_ticks_as_its_schedule_has_them() -> None:
    order = tick_order(pipelining("1f1b", 2, 3, [1, 1]), 6)
    # Stage 0 runs F0 F1 B0 F2 B1 B2; each microbatch has two rows.
    for place, (phase, microbatch) in enumerate(
        [(Phase.FORWARD, 0), (Phase.FORWARD, 1), (Phase.BACKWARD, 0), (Phase.FORWARD, 2)]
    ):
        for row in range(2):
            tick = Tick(7, 0, 2 * microbatch + row, phase)
            assert order.turn(0, tick) == Turn(place, place)
            assert order.row(tick) == row


def test_the_first_stage_may_run_the_attention_of_a_split_backward_with_either_part() -> None:
    order = tick_order(pipelining("zero-bubble", 2, 4, [1, 1]), 4)
    ticks = [Tick(0, 0, i, Phase.BACKWARD) for i in range(4)]
    assert all(order.turn(0, tick).latest > order.turn(0, tick).earliest for tick in ticks)
    assert all(order.turn(1, tick).latest == order.turn(1, tick).earliest for tick in ticks)


@pytest.mark.parametrize(
    ("layers", "n_ranks", "expected"),
    [
        ([2, 3, 1], 3, [range(1, 3), range(3), range(2, 3)]),
        # Two stages a rank: 0 and 2 on the first, 1 and 3 on the second.
        ([1, 2, 1, 2], 2, [range(2, 3), range(2), range(3, 4), range(2, 4)]),
    ],
)
def test_stages_have_the_last_layers_of_the_job(
    layers: list[int], n_ranks: int, expected: list[range]
) -> None:
    name = "1f1b" if len(layers) == n_ranks else "interleaved"
    found = pipelining(name, n_ranks, 4, layers)
    assert [found.job_layers(stage) for stage in range(len(layers))] == expected


def test_documents_take_part_in_the_layers_that_their_rank_has() -> None:
    manifest = Manifest.merge([RankManifest.from_lengths(3, rank, [[4]]) for rank in range(2)], 2)
    ticks = FirstTicks(manifest, rank_layers=[3, 1])
    taking_part = {
        index: ticks.documents(0, ticks.stretch(0, index)).tolist() for index in range(6)
    }
    both, alone = [True, True], [True, False]
    assert taking_part == {0: alone, 1: alone, 2: both, 3: both, 4: alone, 5: alone}
