"""Megatron's tracker of random states, left while the other half of a microbatch has its turn.

With sequence parallelism a transformer block runs all layers inside one ``tracker.fork()``, so both
halves are in a fork of the same tracker at once. It would find the other's name when it ends, and
raise; and both would draw the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.tensor_parallel import random as megatron_random

_OUTSIDE = "default-rng"
"""A tracker's name for the state of what is in no fork."""


def can_be_left() -> bool:
    """Return whether the tracker is Megatron's own: TransformerEngine's does not show its
    fork."""
    return hasattr(megatron_random.get_cuda_rng_tracker(), "_current_state_name")


@contextmanager
def outside_fork() -> Iterator[None]:
    """Inside the block the tracker is in no fork; after it in the same one as before, whose numbers
    go on after those that the other half has drawn there."""
    tracker: Any = megatron_random.get_cuda_rng_tracker()
    name = getattr(tracker, "_current_state_name", _OUTSIDE)
    if name == _OUTSIDE:
        yield
        return
    graph_safe = tracker.use_cudagraphable_rng
    tracker.states_[name] = megatron_random._get_cuda_rng_state(graph_safe=graph_safe)
    tracker._current_state_name = _OUTSIDE
    try:
        yield
    finally:
        tracker._current_state_name = name
        megatron_random._set_cuda_rng_state(tracker.states_[name], graph_safe=graph_safe)
