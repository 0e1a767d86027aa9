"""CA-tasks: queries ``[q_begin, q_end)`` of one document with all of their keys, ``[0, q_end)``.

A task has its whole context, so its output is final: no partial softmax is ever merged. The queries
of a document's tasks partition it. Work is counted in pairs of query and key; a task costs seconds,
and away from home bytes, save for keys that the server has already or reads for another task:

    pairs(a, b)   = sum of (i + 1) for a <= i < b = (b (b + 1) - a (a + 1)) / 2
    seconds(a, b) = launch + pairs(a, b) * seconds_per_pair
    bytes(a, b)   = w_q (b - a) + w_kv b,    w_q: Q there and O back,    w_kv: K and V there

The paper measures seconds over a grid of query and key lengths; two constants will do here. The
backward pass takes about 2.5 times as long on every server alike, so one plan serves both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from examples.nano_distca.documents import NanoBatch


class Task(NamedTuple):
    """A piece of core attention that any server can compute."""

    document: int
    q_begin: int
    q_end: int
    home: int

    @property
    def pairs(self) -> int:
        return (self.q_end * (self.q_end + 1) - self.q_begin * (self.q_begin + 1)) // 2

    def cut(self, begin: int, end: int) -> tuple[Task, list[Task]]:
        """The part ``[begin, end)``, and what is left on either side of it."""
        left, right = self._replace(q_end=begin), self._replace(q_begin=end)
        rest = [task for task in (left, right) if task.q_begin < task.q_end]
        return self._replace(q_begin=begin, q_end=end), rest


def tasks_at_home(batch: NanoBatch) -> list[Task]:
    """One for each segment: attention without any disaggregation."""
    return [Task(*segment) for segment in batch.segments()]


@dataclass(frozen=True)
class Shape:
    """Of core attention; ``element_bytes`` of one number."""

    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 16
    element_bytes: int = 4

    @property
    def query_bytes(self) -> int:
        return 2 * self.heads * self.head_dim * self.element_bytes

    @property
    def key_bytes(self) -> int:
        return 2 * self.heads_kv * self.head_dim * self.element_bytes


@dataclass(frozen=True)
class Cost:
    """Constants of a core of a common CPU."""

    shape: Shape
    launch: float = 2e-4
    seconds_per_pair: float = 4e-8

    def seconds(self, task: Task) -> float:
        return self.launch + task.pairs * self.seconds_per_pair

    def best_end(self, pairs: float) -> float:
        """The end b of the cheapest part [a, b) with so many pairs.

        With x = (b^2 - a^2) / 2 fixed, bytes(a, b) is least at a = kappa b, whatever the length
        of the document: kappa = w_q / (w_q + w_kv), b = sqrt(2 x / (1 - kappa^2)).
        """
        kappa = self.shape.query_bytes / (self.shape.query_bytes + self.shape.key_bytes)
        return math.sqrt(2 * pairs / (1 - kappa**2))
