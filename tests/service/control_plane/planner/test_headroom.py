"""The heap of servers with room."""

from __future__ import annotations

import random

from control_plane.planner.headroom import (
    Headroom,
    change_top,
    no_headroom,
    pop_headroom,
    push_headroom,
)
from tests.service.control_plane.planner.compiled_calls import callable_from_python

new = callable_from_python(no_headroom)
push = callable_from_python(push_headroom)
pop = callable_from_python(pop_headroom)
change = callable_from_python(change_top)


def filled(headroom: list[float]) -> Headroom:
    heap: Headroom = new(len(headroom))
    for server, room in enumerate(headroom):
        push(heap, server, room)
    return heap


def test_any_order_of_changes_gives_the_order_of_rooms() -> None:
    rng = random.Random(0)
    for _ in range(50):
        headroom = [float(rng.randrange(8)) for _ in range(rng.randrange(1, 20))]
        heap = filled(headroom)
        for _ in range(rng.randrange(10)):
            top = int(heap.server[0])
            headroom[top] -= rng.randrange(4)
            change(heap, headroom[top])
        expected = sorted(range(len(headroom)), key=lambda server: (-headroom[server], server))
        assert [pop(heap) for _ in headroom] == expected
        assert heap.size[0] == 0
