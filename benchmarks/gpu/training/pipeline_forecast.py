"""What a step of a pipeline takes by the formulas: every stage alike, transport free.

p stages, m microbatches; l and a: seconds of one microbatch in one stage, forward and backward, of
everything but core attention and of core attention. In tick k of m + p - 1, n(k) stages are active.
"""

from __future__ import annotations


def active_stages(n_stages: int, n_microbatches: int) -> list[int]:
    """Of each tick."""
    n_ticks = n_microbatches + n_stages - 1
    return [min(k + 1, n_stages, n_microbatches, n_ticks - k) for k in range(n_ticks)]


def one_f_one_b(n_stages: int, n_microbatches: int, linear: float, attention: float) -> float:
    """1F1B whose microbatches all take equally long."""
    return (n_microbatches + n_stages - 1) * (linear + attention)


def idle_aware(n_stages: int, n_microbatches: int, linear: float, attention: float) -> float:
    """Attention of a tick spread over all ranks, idle ones taking more: max(l, n (l + a) / p)."""
    ticks = active_stages(n_stages, n_microbatches)
    return sum(max(linear, n * (linear + attention) / n_stages) for n in ticks)
