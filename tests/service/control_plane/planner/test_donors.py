"""Who is above its cap, in which order, and when it is no donor any more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from control_plane.planner.chunk import cut_rules
from control_plane.planner.donors import (
    N_DONORS,
    Donors,
    gather_donors,
    has_given,
    no_donors,
)
from control_plane.planner.fleet import build_fleet
from control_plane.planner.links import Links
from tests.service.control_plane.planner.compiled_calls import callable_from_python
from tests.support.planning_cases import in_place, pool

RULES = cut_rules(0, 8, 3, 512, 16)
N_RANKS = 6
FLEET = build_fleet([*in_place(N_RANKS), *pool(1)], N_RANKS)
LINKS = Links(np.arange(N_RANKS), np.array([0, 0, 1, 1, 2, 2, 3]), 1.0, 4.0)
CAP = np.full(N_RANKS + 1, 10.0)
PAIR_RATE = np.full(N_RANKS + 1, 0.5)

gather = callable_from_python(gather_donors)
give = callable_from_python(has_given)


def donors_of(load: list[float], *, urgency: float = 0.0, every: int = 1) -> Donors:
    donors = Donors(*callable_from_python(no_donors)(LINKS))
    look(donors, load, urgency=urgency, every=every)
    return donors


def look(donors: Donors, load: list[float], *, urgency: float = 0.0, every: int = 1) -> None:
    numbers: tuple[Any, ...] = (np.array(load), CAP, 0.1, PAIR_RATE, urgency, every)
    gather(donors, FLEET, LINKS, RULES, *numbers)


def listed(donors: Donors) -> list[int]:
    servers: list[int] = donors.server[: donors.counts[N_DONORS]].tolist()
    return servers


def test_donors_are_in_place_servers_above_cap_and_slack() -> None:
    donors = donors_of([10.05, 12.0, 9.0, 10.2, 0.0, 10.0, 99.0])
    assert sorted(listed(donors)) == [1, 3]
    assert donors.need.tolist() == pytest.approx([0, 4.0, 0, 0.4, 0, 0, 0])


def test_the_hosts_of_all_servers_are_known() -> None:
    donors = donors_of([0.0] * 7)
    first = donors.host_first
    hosts = [donors.of_host[first[h] : first[h + 1]].tolist() for h in range(4)]
    assert hosts == [[0, 1], [2, 3], [4, 5], [6]]


def test_who_needs_many_receivers_comes_first_and_counts_more() -> None:
    donors = donors_of([20.0, 60.0, 0.0, 30.0, 0.0, 0.0, 0.0], urgency=3.0)
    assert listed(donors) == [1, 3, 0]
    assert donors.urgency[1] == pytest.approx(4.0)
    assert donors.urgency[0] == pytest.approx(1.0 + 3.0 * (10 / 50) ** 2)
    assert donors.far[0] == pytest.approx(LINKS.far / 4.0)


def test_nobody_is_urgent_where_few_receivers_are_needed() -> None:
    donors = donors_of([20.0, 29.0, 0.0, 0.0, 0.0, 0.0, 0.0], urgency=3.0)
    assert donors.urgency[[0, 1]].tolist() == [1.0, 1.0]


def test_a_donor_leaves_when_it_has_given_all_and_the_order_stays() -> None:
    donors = donors_of([60.0, 40.0, 50.0, 0.0, 0.0, 0.0, 0.0], urgency=3.0)
    assert listed(donors) == [0, 2, 1]
    give(donors, RULES, 2, 5.0)
    assert listed(donors) == [0, 2, 1]
    assert donors.bound[1] == pytest.approx(np.sqrt(5.0) * RULES.ideal)
    give(donors, RULES, 0, -1.0)
    assert listed(donors) == [2, 1]
    assert donors.need[0] == 0.0


def test_urgency_is_of_the_first_look() -> None:
    donors = donors_of([60.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], urgency=3.0)
    look(donors, [11.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], urgency=3.0)
    assert donors.urgency[0] == pytest.approx(4.0)


def test_a_sample_takes_one_in_so_many() -> None:
    donors = donors_of([60.0, 50.0, 40.0, 30.0, 20.0, 15.0, 0.0], urgency=3.0, every=3)
    assert listed(donors) == [1, 4]
    assert np.flatnonzero(donors.need).tolist() == [1, 4]
