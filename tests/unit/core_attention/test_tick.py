"""Ticks: order and tags."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core_attention.ca_task import Phase
from core_attention.tick import MAX_LAYERS, MAX_NANO_BATCHES, Tick, ticks_of_lane

ticks = st.builds(
    Tick,
    step=st.integers(0, 2**44 - 1),
    layer=st.integers(0, MAX_LAYERS - 1),
    nano_batch=st.integers(0, MAX_NANO_BATCHES - 1),
    phase=st.sampled_from(Phase),
)


@given(ticks, ticks, st.booleans(), st.booleans())
def test_tags_are_unique_and_leave_the_top_bit_free(
    one: Tick, other: Tick, reply: bool, other_reply: bool
) -> None:
    same = (one, reply) == (other, other_reply)
    assert (one.tag(reply=reply) == other.tag(reply=other_reply)) == same
    assert 0 <= one.tag(reply=reply) < 2**63


def test_a_lane_goes_forward_and_mirrors_itself() -> None:
    lane = list(ticks_of_lane(7, 1, 3, backward=True))
    assert [(tick.layer, tick.phase) for tick in lane] == [
        (0, Phase.FORWARD),
        (1, Phase.FORWARD),
        (2, Phase.FORWARD),
        (2, Phase.BACKWARD),
        (1, Phase.BACKWARD),
        (0, Phase.BACKWARD),
    ]
    assert {(tick.step, tick.nano_batch) for tick in lane} == {(7, 1)}
    assert list(ticks_of_lane(7, 1, 3, backward=False)) == lane[:3]
