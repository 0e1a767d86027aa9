"""The schedules that have a name: what each rank of a pipeline runs, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from core_attention.errors import ScheduleError
from core_attention.schedule import Action, Kind, Schedule, Slot, actions, from_orders

Order = Callable[[int, int], Schedule]
"""``(n_ranks, n_microbatches) -> Schedule``."""


def one_f_one_b(n_stages: int, n_microbatches: int) -> Schedule:
    """``p - 1 - s`` forwards of stage s to warm up, then one forward and one backward in turn, then
    the remaining backwards (PipeDream-Flush): at most ``p - s`` microbatches in flight."""
    _check_sizes("1f1b", n_stages, n_microbatches)
    orders = []
    for stage in range(n_stages):
        warm_up = min(n_microbatches, n_stages - 1 - stage)
        order = actions(stage, Kind.FORWARD, range(warm_up))
        for i in range(n_microbatches - warm_up):
            order += [Action(stage, Kind.FORWARD, warm_up + i), Action(stage, Kind.BACKWARD, i)]
        rest = range(n_microbatches - warm_up, n_microbatches)
        orders.append(order + actions(stage, Kind.BACKWARD, rest))
    return from_orders("1f1b", orders)


def split_one_f_one_b(n_stages: int, n_microbatches: int) -> Schedule:
    """1F1B whose backwards are in two parts, one right after the other: the stage below begins when
    the gradients of inputs are there, and those of weights are computed meanwhile (arXiv
    2401.10241). The first stage, which nobody waits for, has whole backwards."""
    _check_sizes("1f1b-split", n_stages, n_microbatches)
    whole = one_f_one_b(n_stages, n_microbatches)
    orders = []
    for stage in range(n_stages):
        order: list[Action] = []
        for action in whole.order(stage):
            if action.kind is Kind.BACKWARD and stage:
                parts = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
                order += [action._replace(kind=kind) for kind in parts]
            else:
                order.append(action)
        orders.append(order)
    return from_orders("1f1b-split", orders)


def gpipe(n_stages: int, n_microbatches: int) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965): m microbatches are in flight."""
    _check_sizes("gpipe", n_stages, n_microbatches)
    numbers = range(n_microbatches)
    return from_orders(
        "gpipe",
        [
            actions(stage, Kind.FORWARD, numbers) + actions(stage, Kind.BACKWARD, numbers)
            for stage in range(n_stages)
        ],
    )


def same_phase(n_stages: int, n_microbatches: int) -> Schedule:
    """All stages in one phase in each slot (arXiv 2510.18121, section 4.4).

    Forward slot k runs microbatch ``k - s`` on stage s, backward slot k runs ``k - (p - 1 - s)``,
    and forward slot ``k + p - 1`` comes right before backward slot k. As many slots as 1F1B; early
    stages run their backwards later, so up to ``2 (p - 1 - s) + 1`` microbatches are in flight.
    """
    _check_sizes("same-phase", n_stages, n_microbatches)
    ahead, n_ticks = n_stages - 1, n_microbatches + n_stages - 1
    slots = [_tick(Kind.FORWARD, k, n_stages, n_microbatches) for k in range(min(ahead, n_ticks))]
    for k in range(n_ticks):
        if k + ahead < n_ticks:
            slots.append(_tick(Kind.FORWARD, k + ahead, n_stages, n_microbatches))
        slots.append(_tick(Kind.BACKWARD, k, n_stages, n_microbatches))
    return Schedule("same-phase", tuple(slots))


def _tick(kind: Kind, tick: int, n_stages: int, n_microbatches: int) -> Slot:
    """Slot ``tick`` of one phase: a microbatch enters at one end in each."""
    stages = range(n_stages)
    late = stages if kind is Kind.FORWARD else reversed(stages)
    return tuple(
        Action(stage, kind, tick - after) if 0 <= tick - after < n_microbatches else None
        for stage, after in zip(stages, late, strict=True)
    )


def interleaved(n_ranks: int, n_microbatches: int, n_chunks: int = 2) -> Schedule:
    """Interleaved 1F1B: ``n_chunks`` stages a rank, stage ``c p + r`` on rank r (arXiv 2104.04473,
    section 2.2). A smaller bubble for more microbatches in flight."""
    _check_sizes("interleaved", n_ranks, n_microbatches)
    if n_microbatches % n_ranks:
        raise ScheduleError(
            f"schedule interleaved: {n_microbatches} microbatches over {n_ranks} ranks; they must "
            "be a multiple of the ranks"
        )
    n_actions = n_microbatches * n_chunks
    orders = []
    for rank in range(n_ranks):

        def at(k: int, kind: Kind, rank: int = rank) -> Action:
            chunk = k // n_ranks % n_chunks
            if kind is Kind.BACKWARD:
                chunk = n_chunks - 1 - chunk
            microbatch = k // (n_ranks * n_chunks) * n_ranks + k % n_ranks
            return Action(chunk * n_ranks + rank, kind, microbatch)

        warm_up = min(n_actions, 2 * (n_ranks - 1 - rank) + (n_chunks - 1) * n_ranks)
        order = [at(k, Kind.FORWARD) for k in range(warm_up)]
        for k in range(n_actions - warm_up):
            order += [at(warm_up + k, Kind.FORWARD), at(k, Kind.BACKWARD)]
        rest = range(n_actions - warm_up, n_actions)
        orders.append(order + [at(k, Kind.BACKWARD) for k in rest])
    return from_orders("interleaved", orders)


def zero_bubble(n_stages: int, n_microbatches: int, max_deferred: int | None = None) -> Schedule:
    """Backward passes in two parts, the weights' filling the bubbles, at the memory of 1F1B's
    first stage (ZB-H1, arXiv 2401.10241).

    A stage runs a forward while fewer than ``p - s`` microbatches wait for gradients of inputs and
    fewer than p for those of weights, else gradients of inputs, else of weights. With as many as
    ``max_deferred`` microbatches, 1 or more, between both parts of their backward, which takes
    memory of its own where layers are recomputed, gradients of weights go first.
    """
    _check_sizes("zero-bubble", n_stages, n_microbatches)
    if max_deferred is None:
        max_deferred = n_microbatches
    if max_deferred < 1:
        raise ScheduleError(
            f"schedule zero-bubble: max_deferred is {max_deferred}; it must be 1 or more"
        )
    done: set[Action] = set()
    begun = {kind: [0] * n_stages for kind in Kind}
    slots: list[Slot] = []
    while begun[Kind.BACKWARD_WEIGHT] != [n_microbatches] * n_stages:
        slot = tuple(
            _choose(s, n_stages, n_microbatches, max_deferred, begun, done) for s in range(n_stages)
        )
        for action in slot:
            if action is not None:
                begun[action.kind][action.stage] += 1
                done.add(action)
        slots.append(slot)
    return Schedule("zero-bubble", tuple(slots))


def _choose(
    stage: int,
    n_stages: int,
    n_microbatches: int,
    max_deferred: int,
    begun: Mapping[Kind, list[int]],
    done: set[Action],
) -> Action | None:
    """The action that ``stage`` runs next in a zero-bubble schedule."""
    f, i, w = (
        begun[kind][stage] for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    if i - w >= max_deferred:
        return Action(stage, Kind.BACKWARD_WEIGHT, w)
    arrived = stage == 0 or Action(stage - 1, Kind.FORWARD, f) in done
    if f < n_microbatches and arrived and f - i < n_stages - stage and f - w < n_stages:
        return Action(stage, Kind.FORWARD, f)
    last = stage == n_stages - 1
    if i < f and (last or Action(stage + 1, Kind.BACKWARD_INPUT, i) in done):
        return Action(stage, Kind.BACKWARD_INPUT, i)
    return Action(stage, Kind.BACKWARD_WEIGHT, w) if w < i else None


def _check_sizes(name: str, n_stages: int, n_microbatches: int) -> None:
    for what, value in (("n_stages", n_stages), ("n_microbatches", n_microbatches)):
        if value < 1:
            raise ScheduleError(f"schedule {name}: {what} is {value}; it must be 1 or more")


SCHEDULES: Mapping[str, Order] = {
    "1f1b": one_f_one_b,
    "1f1b-split": split_one_f_one_b,
    "same-phase": same_phase,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}
"""The schedules by name."""
