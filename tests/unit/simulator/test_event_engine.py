"""The discrete-event engine."""

from __future__ import annotations

import pytest

from distca.apps.simulator.errors import InputError
from tests.unit.simulator.event_engine import Job, run


def test_jobs_wait_for_one_another() -> None:
    assert run([Job(2), Job(3, after=(0,)), Job(1, after=(0, 1))]) == [2, 5, 6]


def test_a_resource_serves_one_job_at_a_time_by_priority() -> None:
    jobs = [Job(2, ("gpu",), priority=(1,)), Job(3, ("gpu",), priority=(0,)), Job(1)]
    assert run(jobs) == [5, 3, 1]


def test_a_job_needs_all_its_resources_at_once() -> None:
    jobs = [Job(2, ("out",)), Job(3, ("in",)), Job(1, ("out", "in"), priority=(1,))]
    assert run(jobs) == [2, 3, 4]


def test_a_job_that_cannot_start_lets_others_pass() -> None:
    jobs = [Job(2, ("a",)), Job(2, ("a", "b"), priority=(1,)), Job(1, ("b",), priority=(2,))]
    assert run(jobs) == [2, 4, 1]


def test_no_jobs_end_at_once() -> None:
    assert run([]) == []


def test_jobs_that_wait_for_one_another_are_named() -> None:
    with pytest.raises(InputError, match=r"jobs \[1, 2\] wait for one another"):
        run([Job(1), Job(1, after=(2,)), Job(1, after=(1,))])


def test_negative_seconds_are_refused() -> None:
    with pytest.raises(InputError, match="seconds is -1"):
        Job(-1)
