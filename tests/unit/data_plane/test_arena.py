"""Ranges of slabs."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from data_plane.arena import Arena, Place


def arena_of(*sizes: int) -> Arena:
    arena = Arena()
    for nbytes in sizes:
        arena.add(torch.empty(nbytes, dtype=torch.uint8))
    return arena


def taken(arena: Arena, nbytes: int) -> Place:
    place = arena.take(nbytes)
    assert place is not None
    return place


def test_the_smallest_range_that_is_large_enough_is_taken() -> None:
    arena = arena_of(1000, 300, 500, 300)
    assert (taken(arena, 250).slab.number, taken(arena, 301).slab.number) == (1, 2)
    assert taken(arena, 300).slab.number == 3
    assert taken(arena, 199).slab.number == 2
    assert arena.free_bytes == 1000 + 50


def test_an_exact_range_is_not_divided() -> None:
    arena = arena_of(1024, 256)
    assert arena.take(512, is_exact=True) is None
    exact = arena.take(1024, is_exact=True)
    assert exact is not None
    assert (exact.slab.number, exact.nbytes) == (0, 1024)


def test_the_largest_slab_that_is_free_is_dropped() -> None:
    arena = arena_of(512, 2048, 1024)
    held = taken(arena, 1100)
    assert (arena.drop_largest(), arena.total_bytes) == (1024, 2048 + 512)
    assert arena.drop_largest() == 512
    assert arena.drop_largest() == 0
    arena.give_back(held)
    assert (arena.drop_largest(), arena.total_bytes, arena.free_bytes) == (2048, 0, 0)
    assert not any(arena.slab_sizes.values())


@given(st.data())
def test_ranges_never_overlap_and_nothing_is_lost(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=4))
    arena, held = arena_of(*sizes), list[Place]()
    for gives_back in data.draw(st.lists(st.booleans(), max_size=40)):
        if held and gives_back:
            arena.give_back(held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif place := arena.take(data.draw(st.integers(1, 200))):
            held.append(place)
        owners = [[0] * nbytes for nbytes in sizes]
        for place in held:
            for at in range(place.begin, place.end):
                owners[place.slab.number][at] += 1
        assert all(set(owner) <= {0, 1} for owner in owners)
        assert arena.free_bytes == sum(owner.count(0) for owner in owners)
        # The longest gap between what is held can be taken, and nothing longer.
        gaps = [len(gap) for owner in owners for gap in "".join(map(str, owner)).split("1")]
        if max(gaps):
            longest = taken(arena, max(gaps))
            arena.give_back(longest)
        assert arena.take(max(gaps) + 1) is None
    for place in held:
        arena.give_back(place)
    assert all(taken(arena, nbytes).nbytes == nbytes for nbytes in sorted(sizes, reverse=True))
