"""The ticks that a rank of a pipeline is still to send, by the actions of its schedule."""

from __future__ import annotations

from bisect import bisect_left, insort

Place = tuple[int, int]
"""A step, and an action in what the rank runs of it."""


class Turns:
    """Counts the ticks that a rank has not been answered, by action. Each action may have some.

    Receives are posted for the action that a rank is in. Those of the next one are posted with its
    last reply: a rank that is owed rows needs that before it goes on, and computes before it sends
    again; one that gives only keys may have to wait. So memory for messages grows neither with
    microbatches nor with stages.
    """

    def __init__(self) -> None:
        self._left: dict[Place, int] = {}
        self._places: list[Place] = []

    @property
    def now(self) -> Place | None:
        """The first action that is not over, behind which the rank cannot be; None if no tick is
        left."""
        return self._places[0] if self._places else None

    def expect(self, place: Place) -> None:
        """One more tick is to come."""
        if place not in self._left:
            self._left[place] = 0
            insort(self._places, place)
        self._left[place] += 1

    def over(self, place: Place) -> None:
        """One of its ticks is answered, or will not come."""
        self._left[place] -= 1
        if not self._left[place]:
            del self._left[place]
            del self._places[bisect_left(self._places, place)]
