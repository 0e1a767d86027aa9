"""The ways of training a pipeline that are compared: documents, order, whose attention is where."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from benchmarks.gpu.training.batches import Batch, CannotRun
from benchmarks.gpu.training.microbatches import Layout, as_drawn, evenly
from benchmarks.gpu.training.stack import ModelShape
from core_attention.errors import ScheduleError
from core_attention.schedule import Schedule
from core_attention.schedule_orders import SCHEDULES, Order, zero_bubble

LAYOUTS = {"drawn": as_drawn, "even": evenly}
"""By name: the documents as they come, or packed to equal sums of squares."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of training.

    Attributes:
        name: of it.
        layout: of documents in microbatches, one of LAYOUTS.
        schedule: one of ORDERS, or ``zero-bubble:N``, see ``order_of``.
        served: whether idle ranks take more of core attention, by DistCA; else each stage computes
            its own.
    """

    name: str
    layout: str
    schedule: str
    served: bool

    @property
    def defers_weights(self) -> bool:
        """Whether linear layers put off gradients of weights."""
        # Whatever its sizes.
        return order_of(self.schedule)(2, 2).has_backwards_in_parts

    def table(self, n_ranks: int, n_microbatches: int) -> Schedule:
        """Its schedule as data."""
        return order_of(self.schedule)(n_ranks, n_microbatches)


def order_of(name: str) -> Order:
    """The order called ``name``: one of ORDERS, or ``zero-bubble:N`` with at most N
    microbatches between both parts of their backward, as ``distca schedule --max-deferred N``.

    Raises:
        ValueError: there is none.
    """
    base, _, most = name.partition(":")
    if base == "zero-bubble" and most.isdecimal() and int(most) > 0:
        return partial(zero_bubble, max_deferred=int(most))
    if name not in ORDERS:
        raise ValueError(f"schedule is {name!r}; valid are {', '.join(ORDERS)}, zero-bubble:N")
    return ORDERS[name]


ORDERS = {name: order for name, order in SCHEDULES.items() if name != "interleaved"}
"""Those of one stage a rank."""

_NAMED = {
    way.name: way
    for way in (
        Way(name="drawn", layout="drawn", schedule="1f1b", served=False),
        Way(name="even", layout="even", schedule="1f1b", served=False),
        Way(name="idle-aware", layout="even", schedule="1f1b", served=True),
        Way(name="idle-aware-drawn", layout="drawn", schedule="1f1b", served=True),
    )
}
NAMES = tuple(_NAMED)
DEFAULT = ("drawn", "even", "idle-aware")


def way_of(name: str) -> Way:
    """The way called ``name``: one of NAMES, or with another schedule, such as
    ``idle-aware@zero-bubble`` or ``idle-aware@zero-bubble:1``.

    Raises:
        ValueError: there is none; says which there are.
    """
    base, at, schedule = name.partition("@")
    if base not in _NAMED:
        raise ValueError(f"way is {name!r}; valid are {', '.join(NAMES)}, each also @ a schedule")
    found = replace(_NAMED[base], name=name)
    if at:
        order_of(schedule)
        found = replace(found, schedule=schedule)
    return found


def stage_layers(n_layers: int, n_stages: int) -> tuple[int, ...]:
    """Layers of each stage."""
    each, more = divmod(n_layers, n_stages)
    return tuple(each + (stage < more) for stage in range(n_stages))


def require_runnable(
    way: Way,
    n_ranks: int,
    n_microbatches: int,
    model: ModelShape,
    tokens: int,
    memory_bytes: int | None,
) -> None:
    """Raises CannotRun, which says why, if ``way`` cannot run.

    Args:
        way: which.
        n_ranks: of the pipeline.
        n_microbatches: of a step.
        model: its sizes.
        tokens: of a microbatch.
        memory_bytes: of a device; None: not known.
    """
    if model.layers < n_ranks:
        raise CannotRun(
            f"{way.name} has {n_ranks} stages, and the model {model.layers} layers; give "
            f"--layers {n_ranks} or more"
        )
    try:
        table = way.table(n_ranks, n_microbatches)
    except ScheduleError as error:
        raise CannotRun(f"{way.name}: {error}") from error
    if memory_bytes is None or not way.defers_weights:
        return
    layers = max(stage_layers(model.layers, n_ranks))
    held = max(map(table.deferred, range(n_ranks)))
    needed = held * layers * tokens * _deferred_bytes(model)
    if needed > memory_bytes:
        raise CannotRun(
            f"{way.name} has backwards in two parts, so its layers keep for the second one about "
            f"{needed / 2**30:.0f} GiB ({held} microbatches, {layers} layers of a rank); the "
            f"device has {memory_bytes / 2**30:.0f}: give fewer --tokens"
        )


def in_flight(table: Schedule) -> list[float]:
    """By rank, the most microbatches whose activations it keeps."""
    return [table.in_flight(rank) for rank in range(table.n_ranks)]


def layout_of(way: Way, batch: Batch) -> Layout:
    """Which microbatch holds which documents of ``batch``."""
    return LAYOUTS[way.layout](batch)


def _deferred_bytes(model: ModelShape) -> int:
    """What one token keeps in a layer between both parts of its backward, in 2 bytes each: inputs
    of the matrices, and gradients of their outputs."""
    width = model.hidden // model.heads
    heads, kv_heads = width * model.heads, width * model.kv_heads
    inputs = 2 * model.hidden + heads + model.feed_forward
    return 2 * (inputs + heads + 2 * kv_heads + 2 * model.hidden + 2 * model.feed_forward)
