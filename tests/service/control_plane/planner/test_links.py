"""What a byte costs between a rank and a server."""

from __future__ import annotations

import numpy as np

from control_plane.planner.links import Links, link_cost
from tests.service.control_plane.planner.compiled_calls import callable_from_python

LINKS = Links(np.array([0, 1, -1]), np.array([0, 1, 1]), 1.0, 9.0)


def test_bytes_within_a_machine_are_near_and_of_unknown_machines_far() -> None:
    cost = callable_from_python(link_cost)
    assert [[cost(LINKS, rank, server) for server in range(3)] for rank in range(3)] == [
        [1.0, 9.0, 9.0],
        [9.0, 1.0, 1.0],
        [9.0, 9.0, 9.0],
    ]
