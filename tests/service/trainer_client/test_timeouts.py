"""A rank checks its timeouts against each other, and against those of the control plane."""

from __future__ import annotations

import pytest

from distca.contract.timeouts import TimeoutOrderError
from tests.support.cluster import NODE_SHAPE, Cluster
from tests.support.team import Team
from trainer_client import SessionOptions


def options(**timeouts: float) -> SessionOptions:
    return SessionOptions(
        control_plane="127.0.0.1:1",
        job="job",
        rank=0,
        n_ranks=1,
        n_layers=1,
        shape=NODE_SHAPE,
        data_host="127.0.0.1",
        **timeouts,  # type: ignore[arg-type]
    )


def test_timeouts_of_one_rank_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(
        TimeoutOrderError, match=r"ping_timeout_seconds 2.5 .* tick_timeout_seconds 2.8"
    ):
        options(tick_timeout_seconds=2.8)
    with pytest.raises(TimeoutOrderError, match="collective_timeout_seconds 100"):
        options(collective_timeout_seconds=100.0)
    options(tick_timeout_seconds=2.8, ping_quiet_seconds=0.25)


def test_rank_whose_timeouts_do_not_fit_the_control_planes_is_told(pool_of_four: Cluster) -> None:
    with pytest.raises(
        TimeoutOrderError,
        match=r"lease_seconds 15 \+ connect_timeout_seconds 10 must be less than "
        r"recovery_timeout_seconds 20",
    ):
        Team(
            pool_of_four,
            1,
            NODE_SHAPE,
            placement="pool",
            connect_timeout_seconds=10.0,
            recovery_timeout_seconds=20.0,
        )
