"""A small discrete-event engine: jobs that wait for one another and take turns on resources.

A job starts once all jobs that it waits for have ended and all resources that it needs are free;
among the jobs that could start, the one with the smallest priority goes first. Jobs are not
interrupted.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from distca.contract.checks import check_least


@dataclass(frozen=True)
class Job:
    """One piece of work.

    Attributes:
        seconds: how long it holds its resources.
        resources: names of what it needs alone: a GPU, a sending port, ...
        after: indices of the jobs that must have ended.
        priority: smaller goes first; compared as a tuple.
    """

    seconds: float
    resources: tuple[str, ...] = ()
    after: tuple[int, ...] = ()
    priority: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_least(self, seconds=0)


def run(jobs: Sequence[Job]) -> list[float]:
    """When each job ends, all of them being known at time 0.

    Raises:
        ValueError: some jobs can never start, because they wait for one another.
    """
    waiting = [len(set(job.after)) for job in jobs]
    followers: list[list[int]] = [[] for _ in jobs]
    for index, job in enumerate(jobs):
        for before in set(job.after):
            followers[before].append(index)
    ready = [index for index, count in enumerate(waiting) if count == 0]
    busy: set[str] = set()
    end: list[float | None] = [None] * len(jobs)
    events: list[tuple[float, int]] = []
    now = 0.0
    while ready or events:
        ready = _start(jobs, ready, busy, events, now)
        if not events:
            break
        now = events[0][0]
        while events and events[0][0] == now:
            _, index = heapq.heappop(events)
            end[index] = now
            busy.difference_update(jobs[index].resources)
            for follower in followers[index]:
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    ready.append(follower)
    ended = [time for time in end if time is not None]
    if len(ended) < len(jobs):
        stuck = [index for index, time in enumerate(end) if time is None]
        raise ValueError(f"jobs {stuck[:8]} wait for one another and can never start")
    return ended


def _start(
    jobs: Sequence[Job],
    ready: list[int],
    busy: set[str],
    events: list[tuple[float, int]],
    now: float,
) -> list[int]:
    """Starts what can start; returns the ready jobs that still wait for a resource."""
    left = []
    for index in sorted(ready, key=lambda i: (jobs[i].priority, i)):
        if busy.isdisjoint(jobs[index].resources):
            busy.update(jobs[index].resources)
            heapq.heappush(events, (now + jobs[index].seconds, index))
        else:
            left.append(index)
    return left
