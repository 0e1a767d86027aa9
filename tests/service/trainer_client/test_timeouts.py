"""A rank checks its timeouts against each other, and against those of the control plane."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.trainer_client.test_options import options
from tests.support.cluster import NODE_SHAPE, Cluster
from tests.support.team import Team


@pytest.mark.parametrize(
    "wrong", [{"tick_timeout_seconds": 2.8}, {"collective_timeout_seconds": 100.0}]
)
def test_timeouts_of_one_rank_that_contradict_each_other_are_refused(
    wrong: dict[str, float],
) -> None:
    with pytest.raises(ValueError, match="must be"):
        options(**wrong)


def test_a_shorter_ping_makes_room_for_a_shorter_tick() -> None:
    options(tick_timeout_seconds=2.8, ping_quiet_seconds=0.25)


def test_rank_whose_timeouts_do_not_fit_the_control_planes_is_told(pool_of_four: Cluster) -> None:
    late: dict[str, Any] = {"connect_timeout_seconds": 10.0, "recovery_timeout_seconds": 20.0}
    options(**late)  # By themselves they fit.
    with pytest.raises(ValueError, match="must be"):
        Team(pool_of_four, 1, NODE_SHAPE, placement="pool", **late)
