"""Explores every reachable state of a model, breadth first, and proves what must always hold.

A visited state is remembered by its 64-bit hash alone, as SPIN's hash compaction does: among ten
million states two distinct ones share a hash with a probability of 3e-6.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

State = TypeVar("State", bound=Hashable)


class ModelViolation(AssertionError):
    """Something that must hold does not; carries the shortest way there."""

    def __init__(self, what: str, trace: list[str] | None = None) -> None:
        self.what = what
        self.trace = trace or []
        super().__init__("\n".join([what, *(f"  {n}. {a}" for n, a in enumerate(self.trace, 1))]))


@dataclass(frozen=True)
class Move(Generic[State]):
    """One thing that can happen.

    Attributes:
        name: what, in words.
        state: afterwards.
        fault: it may happen, but nothing can rely on it.
    """

    name: str
    state: State
    fault: bool = False


class Exploration(NamedTuple):
    """How much was explored: all there is, or raised."""

    states: int
    finished_states: int


def explore(
    first: State,
    moves_of: Callable[[State], Iterable[Move[State]]],
    is_finished: Callable[[State], bool],
    *,
    max_states: int,
) -> Exploration:
    """Visits every state that can be reached from ``first``.

    Args:
        first: where it begins.
        moves_of: all that can happen in a state; raises ModelViolation where something that must
            hold does not.
        is_finished: whether all work of a state is done.
        max_states: a bound on the size of the model, so that a test cannot run for ever.

    Raises:
        ModelViolation: ``moves_of`` raised it; or from a state nothing but a fault can happen
            though work is left (deadlock); or a state cannot be left towards a finished one
            without a fault (livelock).
        RuntimeError: there are more than ``max_states`` states.
    """
    began = time.monotonic()
    first_hash = hash(first)
    came_from: dict[int, tuple[int, str]] = {first_hash: (first_hash, "")}
    before: dict[int, list[int]] = {}
    finished: list[int] = []
    frontier = deque([(first, 0)])
    n_moves = depth = 0
    while frontier:
        state, depth = frontier.popleft()
        here = hash(state)
        if is_finished(state):
            finished.append(here)
        can_go_on = False
        try:
            for move in moves_of(state):
                n_moves += 1
                there = hash(move.state)
                if not move.fault:
                    can_go_on = True
                    before.setdefault(there, []).append(here)
                if there not in came_from:
                    came_from[there] = (here, move.name)
                    frontier.append((move.state, depth + 1))
        except ModelViolation as violation:
            raise ModelViolation(violation.what, _trace(came_from, here)) from None
        if not can_go_on and not is_finished(state):
            raise ModelViolation(
                "deadlock: work is left and nothing can happen", _trace(came_from, here)
            )
        if len(came_from) > max_states:
            raise RuntimeError(f"more than max_states={max_states} states; make the model smaller")
    _check_all_can_finish(came_from, before, finished)
    seconds = time.monotonic() - began
    print(f"{len(came_from)} states, {n_moves} moves, up to {depth} in a row, {seconds:.1f} s")
    return Exploration(len(came_from), len(finished))


def _check_all_can_finish(
    came_from: dict[int, tuple[int, str]], before: dict[int, list[int]], finished: list[int]
) -> None:
    can_finish = set(finished)
    frontier = list(finished)
    while frontier:
        for earlier in before.get(frontier.pop(), ()):
            if earlier not in can_finish:
                can_finish.add(earlier)
                frontier.append(earlier)
    for state in came_from:
        if state not in can_finish:
            raise ModelViolation(
                "livelock: without a further fault no finished state can be reached",
                _trace(came_from, state),
            )


def _trace(came_from: dict[int, tuple[int, str]], state: int) -> list[str]:
    trace = []
    while came_from[state][0] != state:
        state, name = came_from[state]
        trace.append(name)
    return trace[::-1]
