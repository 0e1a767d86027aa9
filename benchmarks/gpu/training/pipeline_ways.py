"""The ways of training a pipeline that are compared: documents, order, whose attention is where."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from benchmarks.gpu.training.batches import Batch, CannotRun
from benchmarks.gpu.training.microbatches import Layout, as_drawn, evenly
from benchmarks.gpu.training.stack import ModelShape
from core_attention.errors import ScheduleError
from core_attention.schedule import Schedule
from core_attention.schedule_orders import SCHEDULES, Order, zero_bubble

HOME, EVEN, IDLE_AWARE = "home", "even", "idle-aware"
"""Who computes core attention: each stage its own, all ranks equally, or idle ranks more of it."""

TORCH_INTERLEAVED, TORCH_ZERO_BUBBLE = "torch-interleaved", "torch-zero-bubble"
TORCH_SCHEDULES = {
    TORCH_INTERLEAVED: "ScheduleInterleaved1F1B",
    TORCH_ZERO_BUBBLE: "ScheduleInterleavedZeroBubble",
}
"""Orders that PyTorch brings, two stages a rank, and its classes of them."""
_CHUNKS = 2

LAYOUTS = {"drawn": as_drawn, "even": evenly}
"""By name: the documents as they come, or packed to equal sums of squares."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of training.

    Attributes:
        name: of it.
        layout: of documents in microbatches, one of LAYOUTS.
        schedule: one of ``SCHEDULES`` or TORCH_SCHEDULES, or ``zero-bubble:N``, see ``order_of``.
        attention: HOME, EVEN or IDLE_AWARE.
    """

    name: str
    layout: str
    schedule: str
    attention: str

    @property
    def n_chunks(self) -> int:
        """Stages of a rank."""
        return _CHUNKS if self.schedule in (*TORCH_SCHEDULES, "interleaved") else 1

    @property
    def has_backwards_of_torch(self) -> bool:
        """Whether PyTorch computes gradients of weights apart; then layers cannot be recomputed."""
        return self.schedule == TORCH_ZERO_BUBBLE

    @property
    def defers_weights(self) -> bool:
        """Whether linear layers put off gradients of weights."""
        # Whatever its sizes.
        own = order_of(self.schedule)
        return own is not None and own(2, 2).has_backwards_in_parts

    @property
    def served(self) -> bool:
        """Whether it is one of DistCA's."""
        return self.attention != HOME

    def table(self, n_ranks: int, n_microbatches: int) -> Schedule | None:
        """Its schedule as data; None of PyTorch's own zero-bubble order, which its class makes."""
        if self.schedule == TORCH_ZERO_BUBBLE:
            return None
        name = "interleaved" if self.schedule == TORCH_INTERLEAVED else self.schedule
        order = order_of(name)
        assert order is not None
        return order(n_ranks, n_microbatches)


def order_of(name: str) -> Order | None:
    """The order called ``name``: one of ``SCHEDULES``, or ``zero-bubble:N`` with at most N
    microbatches between both parts of their backward, as ``distca schedule --max-deferred N``; None
    if there is none."""
    base, _, most = name.partition(":")
    if base == "zero-bubble" and most.isdecimal() and int(most) > 0:
        return partial(zero_bubble, max_deferred=int(most))
    return SCHEDULES.get(name)


_NAMED = {
    way.name: way
    for way in (
        Way(name="drawn", layout="drawn", schedule="1f1b", attention=HOME),
        Way(name="even", layout="even", schedule="1f1b", attention=HOME),
        Way(name="interleaved", layout="even", schedule=TORCH_INTERLEAVED, attention=HOME),
        Way(name="zero-bubble", layout="even", schedule=TORCH_ZERO_BUBBLE, attention=HOME),
        Way(name="even-pool", layout="even", schedule="same-phase", attention=EVEN),
        Way(name="idle-aware", layout="even", schedule="1f1b", attention=IDLE_AWARE),
        Way(name="idle-aware-drawn", layout="drawn", schedule="1f1b", attention=IDLE_AWARE),
    )
}
NAMES = tuple(_NAMED)
DEFAULT = ("drawn", "even", "interleaved", "zero-bubble", "even-pool", "idle-aware")


def way_of(name: str) -> Way:
    """The way called ``name``: one of NAMES, or with another schedule, such as
    ``idle-aware@zero-bubble`` or ``idle-aware@zero-bubble:1``.

    Raises:
        ValueError: there is none; says which there are.
    """
    base, _, schedule = name.partition("@")
    known = not schedule or order_of(schedule) is not None
    if base not in _NAMED or not known or name.endswith("@"):
        raise ValueError(
            f"way is {name!r}; valid are {', '.join(NAMES)}, each also with one of "
            f"{', '.join('@' + order for order in SCHEDULES)} or @zero-bubble:N behind, N from 1"
        )
    found = _NAMED[base]
    return Way(
        name=name,
        layout=found.layout,
        schedule=schedule or found.schedule,
        attention=found.attention,
    )


def stage_layers(n_layers: int, n_stages: int) -> tuple[int, ...]:
    """Layers of each stage, as ``distca train`` divides them."""
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
    n_stages = n_ranks * way.n_chunks
    if model.layers < n_stages:
        raise CannotRun(
            f"{way.name} has {n_stages} stages, and the model {model.layers} layers; give "
            f"--layers {n_stages} or more"
        )
    if n_microbatches % n_ranks and way.n_chunks > 1:
        raise CannotRun(
            f"{way.name} needs microbatches in a multiple of the {n_ranks} ranks, and there are "
            f"{n_microbatches}"
        )
    try:
        table = way.table(n_ranks, n_microbatches)
    except ScheduleError as error:
        raise CannotRun(f"{way.name}: {error}") from error
    if memory_bytes is None:
        return
    layers = max(stage_layers(model.layers, n_ranks))
    if way.has_backwards_of_torch:
        # One microbatch of each stage in flight at least, as many as ranks at most.
        held = min(n_ranks, n_microbatches)
        needed = held * layers * tokens * _kept_bytes(model)
        why = "are not recomputed and keep"
    elif way.defers_weights and table is not None:
        held = max(map(table.deferred, range(n_ranks)))
        needed = held * layers * tokens * _deferred_bytes(model)
        why = "keep for the second one"
    else:
        return
    if needed > memory_bytes:
        raise CannotRun(
            f"{way.name} has backwards in two parts, so its layers {why} about "
            f"{needed / 2**30:.0f} GiB ({held} microbatches, {layers} layers of a rank); the "
            f"device has {memory_bytes / 2**30:.0f}: give fewer --tokens"
        )


def in_flight(table: Schedule) -> list[float]:
    """By rank, the most microbatches whose activations it keeps."""
    return [table.in_flight(rank) for rank in range(table.n_ranks)]


def layout_of(way: Way, batch: Batch) -> Layout:
    """Which microbatch holds which documents of ``batch``."""
    return LAYOUTS[way.layout](batch)


def _kept_bytes(model: ModelShape) -> int:
    """What one token keeps in a layer for its backward, in 2 bytes each: inputs of the norms, of
    the matrices and of the sums; q, k, v and o; and three tensors of the feed-forward part."""
    heads = model.hidden // model.heads * 2 * (model.heads + model.kv_heads)
    return 2 * (6 * model.hidden + heads + 3 * model.feed_forward)


def _deferred_bytes(model: ModelShape) -> int:
    """What one token keeps in a layer between both parts of its backward, in 2 bytes each: inputs
    of the matrices, and gradients of their outputs."""
    width = model.hidden // model.heads
    heads, kv_heads = width * model.heads, width * model.kv_heads
    inputs = 2 * model.hidden + heads + model.feed_forward
    return 2 * (inputs + heads + 2 * kv_heads + 2 * model.hidden + 2 * model.feed_forward)
