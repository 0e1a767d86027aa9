"""Routing: which rows travel from which rank to which server, derived, never sent.

From (manifest, tasks) trainers and servers compute the same :class:`PairRoute` for every pair of
a home rank and a server. A tick then needs one message per pair and no headers: the request holds
the Q rows of the pair's tasks, task after task, and each K and V row once however many tasks read
it; the reply holds O and log-sum-exp for the same Q rows (forward), or dQ for the Q rows and dK,
dV for the K/V rows (backward), in the same order.

Keys that a document carries are K/V rows like others, of the ranks that hold them; where the
nano-batch before hands them over, they lie behind the rows of the nano-batch itself. However many
documents of a server carry a row, it travels once, and its dK and dV are sums over all of them.

The order is fixed: tasks by (document, q_begin), K/V runs by (document, offset). Members that hold
different slices of a plan agree on it, because a slice keeps the order of documents.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from core_attention.arrays import (
    BoolArray,
    Int64Array,
    distinct,
    exclusive_cumsum,
    group_bounds,
    runs_to_rows,
)
from core_attention.ca_task import TaskTable, home_segment
from core_attention.manifest import Manifest


@dataclass(frozen=True, eq=False)
class PairRoute:
    """The rows that travel between one home rank and one server in every tick of a (nano-batch,
    phase).

    Attributes:
        rank: home of the rows.
        server: index into the plan's servers.
        task: ``[n_q_runs]`` index into the task table of each task with its Q on ``rank``.
        q_row: ``[n_q_runs]`` first packed row of the task's queries on ``rank``.
        q_length: ``[n_q_runs]`` its queries.
        kv_document: ``[n_kv_runs]`` document of each run of K/V rows; runs that begin in one row
            are the same rows, which several documents carry.
        kv_offset: ``[n_kv_runs]`` position of the run's first row in the document.
        kv_row: ``[n_kv_runs]`` its first packed row on ``rank``.
        kv_length: ``[n_kv_runs]`` its rows.
    """

    rank: int
    server: int
    task: Int64Array
    q_row: Int64Array
    q_length: Int64Array
    kv_document: Int64Array
    kv_offset: Int64Array
    kv_row: Int64Array
    kv_length: Int64Array

    @cached_property
    def n_q_rows(self) -> int:
        return int(self.q_length.sum())

    @cached_property
    def n_kv_rows(self) -> int:
        return int(self._sent.length.sum())

    @cached_property
    def q_rows(self) -> Int64Array:
        """``[n_q_rows]`` packed rows on ``rank``, in message order."""
        return runs_to_rows(self.q_row, self.q_length)

    @cached_property
    def kv_rows(self) -> Int64Array:
        """``[n_kv_rows]`` packed rows on ``rank``, in message order."""
        return runs_to_rows(self._sent.row, self._sent.length)

    @cached_property
    def q_position(self) -> Int64Array:
        """``[n_q_runs]`` where each task's queries begin in the message's Q rows."""
        return exclusive_cumsum(self.q_length)

    @cached_property
    def kv_position(self) -> Int64Array:
        """``[n_kv_runs]`` where each run begins in the message's K/V rows."""
        return np.asarray(exclusive_cumsum(self._sent.length)[self._sent.place])

    @cached_property
    def _sent(self) -> _SentRuns:
        """The runs of K/V rows in the message, each as long as any document reads it."""
        if len(distinct(self.kv_row)) == len(self.kv_row):
            return _SentRuns(self.kv_row, self.kv_length, np.arange(len(self.kv_row)))
        order = np.argsort(self.kv_row, kind="stable")
        bounds = group_bounds((self.kv_row[order],))
        first, n_readers = order[bounds[:-1]], np.diff(bounds)
        length = np.maximum.reduceat(self.kv_length[order], bounds[:-1])
        # In the order of their first readers.
        in_order = np.argsort(first)
        place = np.empty_like(order)
        place[order] = np.repeat(np.argsort(in_order), n_readers)
        return _SentRuns(self.kv_row[first[in_order]], length[in_order], place)


class _SentRuns(NamedTuple):
    """Runs of K/V rows as a message has them.

    Attributes:
        row, length: ``[n_sent]`` first packed row and rows.
        place: ``[n_kv_runs]`` which of them each run of the route is.
    """

    row: Int64Array
    length: Int64Array
    place: Int64Array


def derive_routes(
    manifest: Manifest, tasks: TaskTable, nano_batch: int, documents: BoolArray | None = None
) -> dict[tuple[int, int], PairRoute]:
    """The routes of every (rank, server) pair that exchanges rows, for one nano-batch.

    Args:
        manifest: of the step, or a slice.
        tasks: the CA-tasks of one phase over the same documents.
        nano_batch: which nano-batch.
        documents: ``[n_documents]`` which documents take part; None for all.

    Returns:
        A mapping from (rank, server) to the pair's route, sorted by its key. A pair with K/V but
        no Q is in it; a pair with nothing to exchange is not.
    """
    taking_part = manifest.document_nano_batch == nano_batch
    if documents is not None:
        taking_part = taking_part & documents
    chosen = np.flatnonzero(taking_part[tasks.document])
    q_runs = _q_runs(manifest, tasks, chosen)
    kv_runs = _kv_runs(manifest, tasks, chosen)
    q_parts, kv_parts = _split_by_pair(q_runs), _split_by_pair(kv_runs)
    no_q, no_kv = q_runs[:0, 2:], kv_runs[:0, 2:]
    routes = {}
    for rank, server in sorted(q_parts.keys() | kv_parts.keys()):
        q, kv = q_parts.get((rank, server), no_q), kv_parts.get((rank, server), no_kv)
        routes[rank, server] = PairRoute(rank, server, *q.T, *kv.T)
    return routes


def _q_runs(manifest: Manifest, tasks: TaskTable, chosen: Int64Array) -> Int64Array:
    """Rows (rank, server, task, q_row, q_length), sorted by (rank, server, task)."""
    segment = home_segment(manifest, tasks)[chosen]
    q_begin, q_end = tasks.q_begin[chosen], tasks.q_end[chosen]
    row = manifest.segment_row[segment] + q_begin - manifest.segment_offset[segment]
    rank, server = manifest.segment_rank[segment], tasks.server[chosen]
    order = np.lexsort((chosen, server, rank))
    return np.stack([rank, server, chosen, row, q_end - q_begin], axis=1)[order]


def _kv_runs(manifest: Manifest, tasks: TaskTable, chosen: Int64Array) -> Int64Array:
    """Rows (rank, server, document, offset, row, length), sorted likewise.

    A server's keys of a document are ``[0, k_end)``, k_end being the largest of its tasks.
    """
    document, server = tasks.document[chosen], tasks.server[chosen]
    task_k_end = tasks.k_end(manifest)[chosen]
    order = np.lexsort((document, server))
    document, server, task_k_end = document[order], server[order], task_k_end[order]
    bounds = group_bounds((server, document))
    first = bounds[:-1]
    k_end = np.maximum.reduceat(task_k_end, first) if len(first) else task_k_end
    document, server = document[first], server[first]
    found = [_key_runs(manifest, "segment", document, server, k_end)]
    if manifest.n_carried:
        found.append(_key_runs(manifest, "carried", document, server, k_end))
    rank, server, document, offset, row, length = map(np.concatenate, zip(*found, strict=True))
    order = np.lexsort((offset, document, server, rank))
    return np.stack([rank, server, document, offset, row, length], axis=1)[order]


def _key_runs(
    manifest: Manifest, kind: str, document: Int64Array, server: Int64Array, k_end: Int64Array
) -> tuple[Int64Array, ...]:
    """The runs (rank, server, document, offset, row, length) of the ``"segment"`` or ``"carried"``
    columns that hold keys ``[0, k_end)`` of each (document, server)."""
    first = manifest.first_segment if kind == "segment" else manifest.first_carried
    count = first[document + 1] - first[document]
    run = runs_to_rows(first[document], count)
    server, k_end = np.repeat(server, count), np.repeat(k_end, count)
    of, offset, length, rank, row = (
        getattr(manifest, f"{kind}_{name}")[run]
        for name in ("document", "offset", "length", "rank", "row")
    )
    length = np.minimum(length, k_end - offset)
    needed = length > 0
    return tuple(column[needed] for column in (rank, server, of, offset, row, length))


def _split_by_pair(runs: Int64Array) -> dict[tuple[int, int], Int64Array]:
    """The runs of each (rank, server), without those two columns."""
    bounds = group_bounds((runs[:, 0], runs[:, 1]))
    return {
        (int(runs[begin, 0]), int(runs[begin, 1])): runs[begin:end, 2:]
        for begin, end in itertools.pairwise(bounds)
    }
