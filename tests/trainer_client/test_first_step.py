"""Ranks that meet on the host before their first step."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore, Store

from trainer_client.errors import SessionClosed
from trainer_client.step.first_step import collective_store, meet


def meet_late(store: Store, late_seconds: float, job_id: str = "job") -> float:
    time.sleep(late_seconds)
    assert meet(store, job_id, 3, timeout_seconds=10.0, check=lambda: None)
    return time.monotonic()


def test_nobody_goes_on_before_the_last_has_come() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as ranks:
        began = time.monotonic()
        went_on = list(ranks.map(lambda late: meet_late(store, late), (0.0, 0.2, 0.4)))
    assert min(went_on) - began >= 0.4


def test_jobs_do_not_count_for_each_other() -> None:
    store = HashStore()
    store.add("distca/other/connected", 2)
    assert not meet(store, "job", 3, timeout_seconds=0.05, check=lambda: None)


def test_a_rank_that_does_not_come_holds_nobody_for_long(caplog: pytest.LogCaptureFixture) -> None:
    assert not meet(HashStore(), "job", 3, timeout_seconds=0.05, check=lambda: None)
    assert "1 of 3 ranks have begun their first step" in caplog.text


def test_a_job_that_ends_ends_the_wait() -> None:
    def closed() -> None:
        raise SessionClosed("rank 2 failed")

    with pytest.raises(SessionClosed, match="rank 2 failed"):
        meet(HashStore(), "job", 3, timeout_seconds=10.0, check=closed)


def test_without_collectives_there_is_no_store() -> None:
    assert collective_store(2) is None
