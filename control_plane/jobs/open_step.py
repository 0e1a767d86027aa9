"""The open step of a job whose control plane numbers the steps: ranks join it, then it is planned.

A rank hands in what its next forward holds, without a number. The open step is planned, and gets
its number, when each rank has joined it or is *excused*. A rank that comes later joins the next
one, so ranks with unlike numbers of forwards need nothing of one another.

Ranks make *rounds*: some forwards each, and after the backward pass of the last one a collective of
all ranks. A rank that says which forward is the last of its round is exact: it is excused from then
on until all others that say it have said it too, since it comes back no sooner. Of one that does
not say it, nobody knows whether it sits in a collective or is about to come: it is waited for
during a window, and so is one that has said it where its loop breaks a round off.

A hand-in may come before its forward begins. It is of the next round then, if the rank has said the
last of its round, and joins when that round is over for all.

Pure state: the time comes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from core_attention.manifest import RankManifest
from core_attention.step_lane import place_of
from distca.contract.timeouts import default_seconds

JOIN_SECONDS = default_seconds("join_seconds")
ROUND_JOIN_SECONDS = default_seconds("round_join_seconds")

WINDOW_SHARE = 1 / 20
"""The share of a step's length that a rank waits for others, where that is longer than the window:
ranks differ in speed by some percent, and a step without balance costs more."""

_MOST_SECONDS = default_seconds("plan_timeout_seconds") / 2
"""However long steps are: ranks do not wait for a plan for ever."""


@dataclass(frozen=True, kw_only=True)
class HandIn:
    """The documents of a rank's next forward.

    Attributes:
        sequence: counts the rank's hand-ins, from 1 on.
        manifest: with all documents in its first nano-batches.
        forward_only: there is no backward pass.
        turns: these nano-batches.
        first_step: its number is not below.
        open_places: of steps that the rank has open; the step is in none of them. See
            :mod:`core_attention.step_lane`.
        is_awaited: the forward has begun.
        round: that the forward is of; None if nobody knows.
        since: when it came, or its forward has begun.
    """

    sequence: int
    manifest: RankManifest
    forward_only: bool
    turns: int = 1
    first_step: int = 0
    open_places: frozenset[int] = frozenset()
    is_awaited: bool = True
    round: int | None = None
    since: float = 0.0


@dataclass(frozen=True, kw_only=True)
class JoinedStep:
    """A step that is to be planned.

    Attributes:
        step: its number.
        hand_ins: by rank, of those that have joined.
        is_late: a rank that is not excused has not come in time.
    """

    step: int
    hand_ins: Mapping[int, HandIn]
    is_late: bool


class OpenStep:
    """The step that ranks join at the moment, and their rounds.

    Args:
        n_ranks, n_nano_batches: of the job.
        group_of: the ranks that join with a rank or not at all, itself among them; empty: it joins
            alone.

    Attributes:
        next_step: numbers from here on are free.
    """

    def __init__(
        self, n_ranks: int, n_nano_batches: int, group_of: Callable[[int], Sequence[int]]
    ) -> None:
        self.next_step = 0
        self._n_nano_batches = n_nano_batches
        self._group_of = group_of
        self._ranks = set(range(n_ranks))
        self._waiting: dict[int, HandIn] = {}
        self._received: dict[int, int] = {}
        # By rank that says it: rounds whose last forward has begun.
        self._closed: dict[int, int] = {}
        self._step_seconds: dict[int, float] = {}
        self._last_members: Set[int] = self._ranks
        # Not after the first awaited hand-in that waits.
        self._waited_since = math.inf

    @property
    def waiting(self) -> Mapping[int, HandIn]:
        """The hand-ins of the ranks that have joined, or are to when their round begins."""
        return self._waiting

    @property
    def missing(self) -> list[int]:
        """The ranks that are waited for."""
        return sorted(self._missing())

    def hand_in(self, rank: int, hand_in: HandIn) -> None:
        """A rank joins; an earlier hand-in of it that has not been planned is void. Repeating one
        changes nothing."""
        if rank in self._ranks and hand_in.sequence > self._received.get(rank, 0):
            self.received(rank, hand_in.sequence)
            self._set_waiting(rank, hand_in)

    def received(self, rank: int, sequence: int) -> None:
        """A hand-in of a rank is known; it does not join any more."""
        self._received[rank] = max(sequence, self._received.get(rank, 0))

    def begins(self, rank: int, sequence: int, round_: int | None, now: float) -> None:
        """The forward of a hand-in has begun."""
        waiting = self._waiting.get(rank)
        if waiting is not None and waiting.sequence == sequence and not waiting.is_awaited:
            self._set_waiting(rank, replace(waiting, is_awaited=True, round=round_, since=now))

    def closes(self, rank: int, closed_rounds: int) -> None:
        """A rank has begun the last forward of so many rounds."""
        if rank in self._ranks:
            self._closed[rank] = max(closed_rounds, self._closed.get(rank, 0))

    def took(self, rank: int, seconds: float) -> None:
        """A rank's last step took so long."""
        self._step_seconds[rank] = seconds

    def leave(self, rank: int) -> None:
        """A rank does not join any more."""
        self._ranks.discard(rank)
        self._waiting.pop(rank, None)
        self._closed.pop(rank, None)

    def has_joined(self, rank: int) -> bool:
        """Return whether a rank joins steps that are numbered here."""
        return rank in self._received

    def numbered(self, step: int) -> None:
        """A step has got its number from an earlier control plane, or from a rank at home."""
        self.next_step = max(self.next_step, step + 1)

    def deadline(self) -> float | None:
        """When the open step is planned without those that are missing; None if nobody waits.

        Before the first step ranks are on their way to the job, at the speed of their processes."""
        known = not self.next_step or all(rank in self._closed for rank in self._missing())
        return min(
            (
                each.since + self._patience(rank, known=known)
                for rank, each in self._whole_groups(self._here()).items()
                if each.is_awaited
            ),
            default=None,
        )

    def take(self, now: float) -> JoinedStep | None:
        """The open step, if it is to be planned now; the next one is open then."""
        is_late = self._misses_any()
        # Asked after every hand-in: nothing of the whole job's size is looked at before its time.
        if is_late and now < self._waited_since + JOIN_SECONDS:
            return None
        here = self._whole_groups(self._here())
        if not here:
            return None
        if is_late and now < (self.deadline() or math.inf):
            return None
        eldest = min(here, key=lambda rank: here[rank].since)
        alike = {
            rank: each
            for rank, each in here.items()
            if (each.forward_only, each.turns) == (here[eldest].forward_only, here[eldest].turns)
        }
        step = self._number(alike, eldest)
        joined = self._whole_groups(
            {rank: each for rank, each in alike.items() if self._fits(each, step)}
        )
        if not joined:
            return None
        for rank in joined:
            del self._waiting[rank]
        self.next_step = step + 1
        self._last_members = joined.keys()
        awaited = [each.since for each in self._waiting.values() if each.is_awaited]
        self._waited_since = min(awaited, default=math.inf)
        return JoinedStep(step=step, hand_ins=joined, is_late=is_late)

    def _set_waiting(self, rank: int, hand_in: HandIn) -> None:
        self._waiting[rank] = hand_in
        if hand_in.is_awaited:
            self._waited_since = min(self._waited_since, hand_in.since)

    def _missing(self) -> Iterator[int]:
        level = self._level
        for rank in self._ranks:
            if rank not in self._waiting and self._closed.get(rank, level) <= level:
                yield rank

    def _misses_any(self) -> bool:
        return len(self._waiting) < len(self._ranks) and any(True for _ in self._missing())

    @property
    def _level(self) -> int:
        """The round that all ranks that say it have come to. One that is about to run a forward of
        its round, perhaps the last, has not come to the next."""
        return min(
            (
                closed
                if (waiting := self._waiting.get(rank)) is None or waiting.round is None
                else waiting.round
                for rank, closed in self._closed.items()
            ),
            default=0,
        )

    def _here(self) -> dict[int, HandIn]:
        """The hand-ins whose round has begun."""
        level = self._level
        return {
            rank: each
            for rank, each in self._waiting.items()
            if each.is_awaited or (each.round or 0) <= level
        }

    def _whole_groups(self, here: dict[int, HandIn]) -> dict[int, HandIn]:
        return {
            rank: each
            for rank, each in here.items()
            if all(other in here for other in self._group_of(rank))
        }

    def _patience(self, rank: int, *, known: bool) -> float:
        """How long a rank waits for others; ``known``: these are sure to come, or nearly.

        One that was not in the step before has come late. Those before it run that step since, and
        take no longer than it took for its own: so long it waits, and they go on together."""
        window = ROUND_JOIN_SECONDS if known else JOIN_SECONDS
        share = WINDOW_SHARE if rank in self._last_members else 1.0
        return max(window, min(share * self._step_seconds.get(rank, 0.0), _MOST_SECONDS))

    def _number(self, joining: Mapping[int, HandIn], eldest: int) -> int:
        """The first free number that fits all of ``joining``, or else the eldest and its group."""
        first = max(self.next_step, *(each.first_step for each in joining.values()))
        for those in (joining.keys(), {eldest, *self._group_of(eldest)} & joining.keys()):
            for step in range(first, first + self._n_nano_batches):
                if all(self._fits(joining[rank], step) for rank in those):
                    return step
        return first

    def _fits(self, hand_in: HandIn, step: int) -> bool:
        place = place_of(step, self._n_nano_batches, hand_in.turns)
        return step >= hand_in.first_step and place not in hand_in.open_places
