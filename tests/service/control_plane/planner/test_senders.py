"""Who is above its cap, in which order, and when it is no sender any more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from control_plane.planner.chunk import cut_rules
from control_plane.planner.fleet import build_fleet
from control_plane.planner.links import Links
from control_plane.planner.senders import (
    N_SENDERS,
    Senders,
    gather_senders,
    has_given,
    no_senders,
)
from tests.service.control_plane.planner.compiled_calls import callable_from_python
from tests.support.planning_cases import in_place, pool

RULES = cut_rules(0, 8, 3, 512, 16)
N_RANKS = 6
FLEET = build_fleet([*in_place(N_RANKS), *pool(1)], N_RANKS)
LINKS = Links(np.arange(N_RANKS), np.array([0, 0, 1, 1, 2, 2, 3]), 1.0, 4.0)
CAP = np.full(N_RANKS + 1, 10.0)
PAIR_RATE = np.full(N_RANKS + 1, 0.5)

gather = callable_from_python(gather_senders)
give = callable_from_python(has_given)


def senders_of(load: list[float], *, urgency: float = 0.0, every: int = 1) -> Senders:
    senders = Senders(*callable_from_python(no_senders)(LINKS))
    look(senders, load, urgency=urgency, every=every)
    return senders


def look(senders: Senders, load: list[float], *, urgency: float = 0.0, every: int = 1) -> None:
    numbers: tuple[Any, ...] = (np.array(load), CAP, 0.1, PAIR_RATE, urgency, every)
    gather(senders, FLEET, LINKS, RULES, *numbers)


def listed(senders: Senders) -> list[int]:
    servers: list[int] = senders.server[: senders.counts[N_SENDERS]].tolist()
    return servers


def test_senders_are_in_place_servers_above_cap_and_slack() -> None:
    senders = senders_of([10.05, 12.0, 9.0, 10.2, 0.0, 10.0, 99.0])
    assert sorted(listed(senders)) == [1, 3]
    assert senders.need.tolist() == pytest.approx([0, 4.0, 0, 0.4, 0, 0, 0])


def test_the_hosts_of_all_servers_are_known() -> None:
    senders = senders_of([0.0] * 7)
    first = senders.host_first
    hosts = [senders.of_host[first[h] : first[h + 1]].tolist() for h in range(4)]
    assert hosts == [[0, 1], [2, 3], [4, 5], [6]]


def test_who_needs_many_receivers_comes_first_and_counts_more() -> None:
    senders = senders_of([20.0, 60.0, 0.0, 30.0, 0.0, 0.0, 0.0], urgency=3.0)
    assert listed(senders) == [1, 3, 0]
    assert senders.urgency[1] == pytest.approx(4.0)
    assert senders.urgency[0] == pytest.approx(1.0 + 3.0 * (10 / 50) ** 2)
    assert senders.far[0] == pytest.approx(LINKS.far / 4.0)


def test_nobody_is_urgent_where_few_receivers_are_needed() -> None:
    senders = senders_of([20.0, 29.0, 0.0, 0.0, 0.0, 0.0, 0.0], urgency=3.0)
    assert senders.urgency[[0, 1]].tolist() == [1.0, 1.0]


def test_a_sender_leaves_when_it_has_given_all_and_the_order_stays() -> None:
    senders = senders_of([60.0, 40.0, 50.0, 0.0, 0.0, 0.0, 0.0], urgency=3.0)
    assert listed(senders) == [0, 2, 1]
    give(senders, RULES, 2, 5.0)
    assert listed(senders) == [0, 2, 1]
    assert senders.bound[1] == pytest.approx(np.sqrt(5.0) * RULES.ideal)
    give(senders, RULES, 0, -1.0)
    assert listed(senders) == [2, 1]
    assert senders.need[0] == 0.0


def test_urgency_is_of_the_first_look() -> None:
    senders = senders_of([60.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], urgency=3.0)
    look(senders, [11.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], urgency=3.0)
    assert senders.urgency[0] == pytest.approx(4.0)


def test_a_sample_takes_one_in_so_many() -> None:
    senders = senders_of([60.0, 50.0, 40.0, 30.0, 20.0, 15.0, 0.0], urgency=3.0, every=3)
    assert listed(senders) == [1, 4]
    assert np.flatnonzero(senders.need).tolist() == [1, 4]
