"""What a server says of the kernel seconds of a step."""

from __future__ import annotations

import pytest

from attention_node.served_job import undisturbed_seconds


def test_calls_that_waited_for_other_work_do_not_make_a_server_slow() -> None:
    quiet = [0.010, 0.010, 0.010, 0.010]
    assert undisturbed_seconds(quiet) == pytest.approx(0.040)
    assert undisturbed_seconds([0.010, 0.032, 0.010, 0.010]) == pytest.approx(0.040)
    assert undisturbed_seconds([0.032, 0.010, 0.010, 0.031, 0.010, 0.012]) == pytest.approx(0.060)


def test_a_slow_server_is_slow_in_every_tick() -> None:
    ticks = [0.010, 0.011, 0.030, 0.010]
    slow = [2 * seconds for seconds in ticks]
    assert undisturbed_seconds(slow) == pytest.approx(2 * undisturbed_seconds(ticks))
    assert undisturbed_seconds([0.010]) == pytest.approx(0.010)
