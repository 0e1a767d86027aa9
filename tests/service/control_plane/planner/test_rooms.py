"""The heap of servers with room."""

from __future__ import annotations

import random

from control_plane.planner.rooms import Rooms, change_top, no_rooms, pop_room, push_room
from tests.service.control_plane.planner.compiled_calls import callable_from_python

new = callable_from_python(no_rooms)
push = callable_from_python(push_room)
pop = callable_from_python(pop_room)
change = callable_from_python(change_top)


def filled(rooms: list[float]) -> Rooms:
    heap: Rooms = new(len(rooms))
    for server, room in enumerate(rooms):
        push(heap, server, room)
    return heap


def test_the_most_room_comes_first_and_ties_go_by_index() -> None:
    heap = filled([1.0, 3.0, 2.0, 3.0, 1.0])
    assert [pop(heap) for _ in range(5)] == [1, 3, 2, 0, 4]
    assert heap.size[0] == 0


def test_whose_room_shrinks_takes_its_place_among_the_others() -> None:
    heap = filled([5.0, 4.0, 3.0])
    change(heap, 3.5)
    assert [pop(heap) for _ in range(3)] == [1, 0, 2]


def test_any_order_of_changes_gives_the_order_of_rooms() -> None:
    rng = random.Random(0)
    for _ in range(50):
        rooms = [float(rng.randrange(8)) for _ in range(rng.randrange(1, 20))]
        heap = filled(rooms)
        for _ in range(rng.randrange(10)):
            top = int(heap.server[0])
            rooms[top] -= rng.randrange(4)
            change(heap, rooms[top])
        expected = sorted(range(len(rooms)), key=lambda server: (-rooms[server], server))
        assert [pop(heap) for _ in rooms] == expected
