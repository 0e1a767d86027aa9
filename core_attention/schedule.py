"""Pipeline schedules as data: which microbatch each rank of a pipeline runs in which slot.

A schedule is a table of slots. In a slot every rank runs one action or idles, and all that runs
side by side shares one pool of attention servers, idle ranks included. 1F1B, interleaved and
zero-bubble orders and the paper's same-phase order (arXiv 2510.18121, section 4.4) are such tables
(``schedule_orders``); so is any CSV file that ``torch.distributed.pipelining`` runs.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from core_attention.ca_task import Phase
from core_attention.errors import ScheduleError


class Kind(StrEnum):
    """The kind of an action; the letters are those of PyTorch's schedules."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of inputs and of weights."""
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    """Without core attention, which has no weights."""

    @property
    def attention_phase(self) -> Phase | None:
        """The phase of core attention that runs in it, if any."""
        if self is Kind.FORWARD:
            return Phase.FORWARD
        return None if self is Kind.BACKWARD_WEIGHT else Phase.BACKWARD


class Action(NamedTuple):
    """One microbatch through one stage, in one direction.

    Attributes:
        stage: of the model, in the order of its layers.
        kind: forward, backward or a part of it.
        microbatch: its number.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Slot = tuple[Action | None, ...]
"""The actions of each rank, None where it idles."""

_ACTION = re.compile(r"(\d{1,18})([FBIW])(\d{1,18})")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
"""PyTorch's cell for actions that may overlap: its runtime runs them one after the other."""


@dataclass(frozen=True)
class Schedule:
    """A table of slots, checked.

    Attributes:
        name: for messages and reports.
        slots: in the order of time.
    """

    name: str
    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        if not self._actions:
            raise ScheduleError(f"schedule {self.name} has no actions; give it slots that run some")
        for at, slot in enumerate(self.slots):
            if len(slot) != self.n_ranks:
                raise ScheduleError(
                    f"schedule {self.name}: slot {at} has {len(slot)} ranks, the first slot has "
                    f"{self.n_ranks}"
                )
        for rank in range(self.n_ranks):
            if not self.order(rank):
                raise ScheduleError(
                    f"schedule {self.name}: rank {rank} (line {rank + 1} of a CSV file) runs "
                    "nothing; give it a stage, or leave it out"
                )
        self._check_numbers()
        self._check_each_runs_once()
        self._check_order()

    @property
    def n_ranks(self) -> int:
        """Ranks of one pipeline."""
        return len(self.slots[0])

    @cached_property
    def n_stages(self) -> int:
        """Stages of the model; a multiple of the ranks where each has several."""
        return 1 + max(action.stage for action in self._actions)

    @cached_property
    def n_microbatches(self) -> int:
        """Microbatches of a step."""
        return 1 + max(action.microbatch for action in self._actions)

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """``[n_stages]`` where each stage lives."""
        found: dict[int, int] = {}
        for action, rank, _ in self._placed:
            if found.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"schedule {self.name}: {action} is on rank {rank}, other actions of stage "
                    f"{action.stage} are on rank {found[action.stage]}; a stage has one rank"
                )
        missing = sorted(set(range(self.n_stages)) - set(found))
        if missing:
            raise ScheduleError(
                f"schedule {self.name} runs nothing on stages {missing} of {self.n_stages}"
            )
        return tuple(found[stage] for stage in range(self.n_stages))

    @cached_property
    def keeps_in_step(self) -> bool:
        """Returns whether each slot has actions of one kind only, so that slots may last unequally
        long."""
        return all(len({action.kind for action in slot if action}) <= 1 for slot in self.slots)

    def order(self, rank: int) -> list[Action]:
        """The actions of ``rank``, one after the other."""
        return [slot[rank] for slot in self.slots if slot[rank] is not None]  # type: ignore[misc]

    def in_flight(self, rank: int) -> float:
        """The most microbatches whose activations ``rank`` keeps at a time.

        A stage's activations count from its forward to the end of its backward (its weight part),
        as the share of the rank's stages that it is.
        """
        n_own = sum(at == rank for at in self.rank_of_stage)
        held = most = 0
        for action in self.order(rank):
            if action.kind is Kind.FORWARD:
                held += 1
                most = max(most, held)
            elif action.kind is not Kind.BACKWARD_INPUT:
                held -= 1
        return most / n_own

    def deferred(self, rank: int) -> int:
        """The most microbatches of ``rank``, over its stages, that are between both parts of their
        backward at a time."""
        held = most = 0
        for action in self.order(rank):
            held += action.kind is Kind.BACKWARD_INPUT
            held -= action.kind is Kind.BACKWARD_WEIGHT
            most = max(most, held)
        return most

    @cached_property
    def has_backwards_in_parts(self) -> bool:
        """Returns whether gradients of inputs and of weights are separate actions somewhere."""
        return any(action.kind is Kind.BACKWARD_INPUT for action in self._actions)

    @cached_property
    def peak_in_flight(self) -> float:
        """The most of all ranks."""
        return max(self.in_flight(rank) for rank in range(self.n_ranks))

    @cached_property
    def _placed(self) -> list[tuple[Action, int, int]]:
        """(action, rank, slot), in the order of time."""
        return [
            (action, rank, at)
            for at, slot in enumerate(self.slots)
            for rank, action in enumerate(slot)
            if action is not None
        ]

    @cached_property
    def _actions(self) -> list[Action]:
        return [action for action, _, _ in self._placed]

    @cached_property
    def _runs(self) -> frozenset[Action]:
        return frozenset(self._actions)

    def _check_numbers(self) -> None:
        """Numbers from 0 without gaps are below the number of actions."""
        for action in self._actions:
            if max(action.stage, action.microbatch) >= len(self._actions):
                raise ScheduleError(
                    f"schedule {self.name} runs {action}, and {len(self._actions)} actions in all; "
                    "stages and microbatches are numbered from 0 without gaps"
                )

    def _check_each_runs_once(self) -> None:
        self.rank_of_stage  # noqa: B018 (raises)
        if len(self._runs) < len(self._actions):
            ((twice, _),) = Counter(self._actions).most_common(1)
            raise ScheduleError(f"schedule {self.name} runs {twice} twice")
        for stage in range(self.n_stages):
            for i in range(self.n_microbatches):
                kinds = {kind for kind in Kind if Action(stage, kind, i) in self._runs}
                if kinds not in ({Kind.FORWARD, Kind.BACKWARD}, set(Kind) - {Kind.BACKWARD}):
                    runs = ", ".join(str(Action(stage, kind, i)) for kind in sorted(kinds))
                    raise ScheduleError(
                        f"schedule {self.name} runs {runs or 'nothing'} of stage {stage} and "
                        f"microbatch {i}; it takes F with B, or F with I and W"
                    )

    def _check_order(self) -> None:
        slot_of = {action: at for action, _, at in self._placed}
        for action, at in slot_of.items():
            for needed in self.needs(action):
                if slot_of[needed] >= at:
                    raise ScheduleError(
                        f"schedule {self.name}: {action} is in slot {at} and needs {needed}, which "
                        f"is in slot {slot_of[needed]}; it must come before"
                    )

    def needs(self, action: Action) -> list[Action]:
        """The actions that must have ended before ``action`` can begin."""
        return [needed for needed in _needs(action, self.n_stages) if needed in self._runs]


def _needs(action: Action, n_stages: int) -> list[Action]:
    """The same, with both forms of a backward part that could give its input."""
    stage, kind, i = action
    if kind is Kind.FORWARD:
        return [Action(stage - 1, kind, i)] if stage else []
    if kind is Kind.BACKWARD_WEIGHT:
        return [Action(stage, Kind.BACKWARD_INPUT, i)]
    above = [Action(stage + 1, k, i) for k in (Kind.BACKWARD, Kind.BACKWARD_INPUT)]
    return [Action(stage, Kind.FORWARD, i), *(above if stage < n_stages - 1 else [])]


def from_orders(name: str, orders: Sequence[Sequence[Action]]) -> Schedule:
    """The schedule in which each rank runs its order as early as slots of equal length allow.

    Args:
        name: of the schedule.
        orders: ``[n_ranks]`` actions, one after the other.
    """
    return Schedule(name, _in_slots(name, orders, dict.fromkeys(Kind, 1)))


def side_by_side(schedule: Schedule, n_slots: Mapping[Kind, int]) -> tuple[Slot, ...]:
    """The actions that run side by side where kinds take unequally long.

    Args:
        schedule: its orders count, not its slots, unless it keeps ranks in step.
        n_slots: how many slots an action of each kind takes, 1 or more.

    Returns:
        Slots of equal length; an action is in as many of them, one after the other, as its kind
        takes.
    """
    if schedule.keeps_in_step:
        return schedule.slots
    orders = [schedule.order(rank) for rank in range(schedule.n_ranks)]
    return _in_slots(schedule.name, orders, n_slots)


def _in_slots(
    name: str, orders: Sequence[Sequence[Action]], n_slots: Mapping[Kind, int]
) -> tuple[Slot, ...]:
    runs = {action for order in orders for action in order}
    n_stages = 1 + max((action.stage for action in runs), default=0)
    waiting = [deque(order) for order in orders]
    running: list[tuple[Action, int] | None] = [None] * len(orders)
    done: set[Action] = set()
    slots: list[Slot] = []
    while any(waiting) or any(running):
        for rank, left in enumerate(waiting):
            if running[rank] is None and left:
                needed = [other for other in _needs(left[0], n_stages) if other in runs]
                if done.issuperset(needed):
                    running[rank] = (left[0], n_slots[left[0].kind])
                    left.popleft()
        if not any(running):
            stuck = ", ".join(str(left[0]) for left in waiting if left)
            raise ScheduleError(
                f"schedule {name}: {stuck} wait for one another and can never start"
            )
        slots.append(tuple(now[0] if now else None for now in running))
        for rank, now in enumerate(running):
            if now is not None:
                action, left_slots = now
                running[rank] = (action, left_slots - 1) if left_slots > 1 else None
                if left_slots == 1:
                    done.add(action)
    return tuple(slots)


def read_csv(name: str, text: str) -> Schedule:
    """The schedule of a CSV file as ``torch.distributed.pipelining`` runs it: a line a rank, with
    cells like ``2F0`` in the order of time, empty where the rank idles. A cell like
    ``(2F1;3B0)OVERLAP_F_B`` holds several, one after the other. A byte-order mark before them is
    left out.

    Columns are slots if no cell holds several, and no action is in a column before what it needs;
    else each line is an order.

    Raises:
        ScheduleError: the text is no valid schedule.
    """
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff")))
    try:
        lines = [row for row in reader if row]
    except csv.Error as error:
        raise ScheduleError(
            f"schedule {name}: line {reader.line_num} is no CSV ({error}); a line has cells such "
            "as 2F0, with commas between"
        ) from error
    cells = [[_parse(name, rank, cell.strip()) for cell in row] for rank, row in enumerate(lines)]
    if not cells:
        raise ScheduleError(f"schedule {name} is empty; it needs a line of actions for each rank")
    if all(len(cell) <= 1 for row in cells for cell in row):
        columns = itertools.zip_longest(*cells, fillvalue=())
        slots = (tuple(cell[0] if cell else None for cell in column) for column in columns)
        with suppress(ScheduleError):
            return Schedule(name, tuple(slot for slot in slots if any(slot)))
    return from_orders(name, [list(itertools.chain.from_iterable(row)) for row in cells])


def is_cell_of_actions(text: str) -> bool:
    """Returns whether ``text`` holds actions as CSV files have them: not so waits, or reductions of
    gradients."""
    return any(pattern.fullmatch(text) for pattern in (_ACTION, _OVERLAPPED))


def write_csv(schedule: Schedule) -> str:
    """The schedule as :func:`read_csv` reads it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for rank in range(schedule.n_ranks):
        writer.writerow("" if slot[rank] is None else str(slot[rank]) for slot in schedule.slots)
    return out.getvalue()


def _parse(name: str, rank: int, cell: str) -> tuple[Action, ...]:
    """The actions of a cell: none where the rank idles."""
    if not cell:
        return ()
    overlapped = _OVERLAPPED.fullmatch(cell)
    found = []
    for text in overlapped[1].split(";") if overlapped else [cell]:
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"schedule {name}: rank {rank} has {cell[:40]!r}; an action is a stage, one of "
                f"{', '.join(Kind)} and a microbatch, such as 2F0"
            )
        found.append(Action(int(match[1]), Kind(match[2]), int(match[3])))
    return tuple(found)


def actions(stage: int, kind: Kind, microbatches: Iterable[int]) -> list[Action]:
    """One kind of action of one stage for each of ``microbatches``."""
    return [Action(stage, kind, i) for i in microbatches]
