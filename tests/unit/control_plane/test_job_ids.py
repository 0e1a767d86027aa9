"""Which of two jobs of one name was opened later."""

from __future__ import annotations

from itertools import pairwise

from control_plane.jobs.job_ids import is_later, name_of, new_job_id, successor_of


def test_a_successor_comes_after_its_job_and_before_every_later_one() -> None:
    for _ in range(200):
        job, next_job = new_job_id("run-1", 7), new_job_id("run-1", 8)
        chain = [job]
        while (successor := successor_of(chain[-1])) is not None:
            chain.append(successor)
        assert all(is_later(b, a) for a, b in pairwise(chain))
        assert is_later(next_job, chain[-1])
        assert {name_of(each) for each in chain} == {"run-1"}


def test_the_last_of_its_number_has_no_successor() -> None:
    assert successor_of("run-00000000000007ffff") is None
    assert successor_of("run-00000000000007fffe") == "run-00000000000007ffff"
