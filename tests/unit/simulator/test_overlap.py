"""One nano-batch at a time: what its messages hide behind."""

from __future__ import annotations

import numpy as np
import pytest

from distca.apps.simulator.cluster import ClusterSpec
from distca.apps.simulator.disaggregated import SlotWork
from distca.apps.simulator.overlap import (
    PAYS,
    PING_PONG,
    Hiding,
    head_groups_that_pay,
    lane_seconds,
)
from distca.apps.simulator.traffic import Messages

CLUSTER = ClusterSpec(
    n_gpus=2,
    tensor_parallel=1,
    gpus_per_host=1,
    gpu_bandwidth_bytes_per_second=1e9,
    message_latency_seconds=0.0,
)


def swapped(gigabytes: int) -> Messages:
    """Two ranks send each other as much: a second each gigabyte."""
    return Messages(2, np.array([0, 1]), np.array([1, 0]), np.full(2, gigabytes * 10**9))


@pytest.mark.parametrize(
    ("way", "seconds"),
    [
        # Linear 1, own 3, others 2, and the reply's 2: the request's 1 hides behind own tasks.
        (Hiding(remote_first=False), 8),
        # Replies travel behind the rest of the own tasks.
        (Hiding(), 6),
        # The second half of the replies hides behind nothing.
        (Hiding(head_groups=2, remote_first=False), 7),
        (Hiding(head_groups=2), 6),
    ],
    ids=str,
)
def test_what_messages_hide_behind(way: Hiding, seconds: float) -> None:
    both = np.ones(2)
    work = SlotWork(both, 5 * both, 3 * both, swapped(1), swapped(2))
    assert lane_seconds(work, 4, way, CLUSTER) == pytest.approx(4 * seconds)


def test_groups_must_save_more_than_the_model_leaves_out() -> None:
    shares: dict[Hiding | str, float] = {
        Hiding(): 0.1,
        Hiding(head_groups=2): 0.02,
        Hiding(head_groups=4): 0.02 - PAYS / 2,
        Hiding(head_groups=8, remote_first=False): 0.0,
        PING_PONG: 0.0,
    }
    assert head_groups_that_pay(shares) == 2
