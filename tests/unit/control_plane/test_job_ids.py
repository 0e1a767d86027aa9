"""Which of two jobs of one name was opened later."""

from __future__ import annotations

from control_plane.jobs.job_ids import is_later, name_of, new_job_id


def test_ids_order_the_jobs_of_a_name() -> None:
    job, next_job = new_job_id("run-1", 7), new_job_id("run-1", 8)
    assert is_later(next_job, job)
    assert not is_later(job, next_job)
    assert {name_of(job), name_of(next_job)} == {"run-1"}
