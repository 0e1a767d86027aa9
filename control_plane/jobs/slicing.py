"""All slices of a plan at once, encoded.

Gives the bytes of ``plan_to_proto(plan.for_rank(r))`` and ``plan_to_proto(plan.for_server(s))`` for
every member, but encodes each column once and gathers rows from it, without the checks that a
slice of a checked plan does not need: 1024 slices of a plan of 16 thousand documents take a tenth
of the time, which is what lets one machine publish to that many members.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core_attention.arrays import Int64Array, runs_to_rows
from core_attention.ca_task import TaskTable
from core_attention.plan import Plan
from distca.contract.codec import (
    DOCUMENT_COLUMNS,
    SEGMENT_COLUMNS,
    TASK_COLUMNS,
    Columns,
    plan_to_proto,
)
from distca.v1 import plan_pb2


class PlanSlicer:
    """Cuts one whole plan.

    Raises:
        WireError: a value of the plan does not fit into its column.
    """

    def __init__(self, plan: Plan, job_id: str) -> None:
        self._plan = plan
        self._whole = plan_to_proto(plan, job_id)
        self._servers = list(self._whole.servers)
        self._documents = _columns(self._whole.manifest, DOCUMENT_COLUMNS)
        self._segments = _columns(self._whole.manifest, SEGMENT_COLUMNS)
        n_documents = plan.manifest.n_documents
        self._phases = [
            (_columns(message, TASK_COLUMNS), _first_task(table, n_documents))
            for message, table in (
                (self._whole.forward, plan.forward),
                (self._whole.backward, plan.backward),
            )
        ]

    def rank_slices(self) -> Iterator[plan_pb2.Plan]:
        """The slice of every rank, in rank order."""
        plan = self._plan
        place = [-1 if s.in_place_rank is None else s.in_place_rank for s in plan.servers]
        in_place_rank = np.array(place, dtype=np.int64)
        ranks = [plan.manifest.segment_rank]
        documents = [plan.manifest.segment_document]
        for table in (plan.forward, plan.backward):
            rank = in_place_rank[table.server]
            ranks.append(rank[rank >= 0])
            documents.append(table.document[rank >= 0])
        for chosen in self._grouped(ranks, documents, plan.manifest.n_ranks):
            yield self._slice(chosen)

    def server_slices(self) -> Iterator[plan_pb2.Plan | None]:
        """The slice of every pool server, in the plan's order; None for a server without a task,
        and for an in-place one, whose tasks are in its rank's slice."""
        pool = np.array([s.in_place_rank is None for s in self._plan.servers], dtype=np.bool_)
        servers, documents = [], []
        for table in (self._plan.forward, self._plan.backward):
            chosen = pool[table.server]
            servers.append(table.server[chosen])
            documents.append(table.document[chosen])
        for group in self._grouped(servers, documents, len(self._servers)):
            yield self._slice(group) if len(group) else None

    def _grouped(
        self, members: list[Int64Array], documents: list[Int64Array], n_members: int
    ) -> list[Int64Array]:
        """The distinct documents of each member, sorted, from pairs of member and document."""
        n_documents = self._plan.manifest.n_documents
        pair = np.unique(np.concatenate(members) * n_documents + np.concatenate(documents))
        member, document = np.divmod(pair, n_documents)
        return np.split(document, np.searchsorted(member, np.arange(1, n_members)))

    def _slice(self, documents: Int64Array) -> plan_pb2.Plan:
        """What :meth:`Plan._slice` gives, encoded."""
        rows = [_rows_of(documents, first) for _, first in self._phases]
        used = np.unique(
            np.concatenate(
                [
                    columns["server"][row]
                    for (columns, _), (row, _) in zip(self._phases, rows, strict=True)
                ]
            )
        )
        forward, backward = (
            _task_table(columns, row, new_document, used)
            for (columns, _), (row, new_document) in zip(self._phases, rows, strict=True)
        )
        return plan_pb2.Plan(
            job_id=self._whole.job_id,
            epoch=self._whole.epoch,
            manifest=self._manifest(documents),
            servers=[self._servers[index] for index in used.tolist()],
            forward=forward,
            backward=backward,
            mask=self._whole.mask,
            planner=self._whole.planner,
            reason=self._whole.reason,
        )

    def _manifest(self, documents: Int64Array) -> plan_pb2.Manifest:
        segment, new_document = _rows_of(documents, self._plan.manifest.first_segment)
        columns = {name: column[documents] for name, column in self._documents.items()}
        columns |= {name: column[segment] for name, column in self._segments.items()}
        columns["segment_document"] = new_document
        whole = self._whole.manifest
        return plan_pb2.Manifest(
            step=whole.step,
            n_ranks=whole.n_ranks,
            n_nano_batches=whole.n_nano_batches,
            whole=False,
            **_encoded(columns, DOCUMENT_COLUMNS | SEGMENT_COLUMNS),
        )


def _task_table(
    columns: dict[str, NDArray[Any]], row: Int64Array, new_document: Int64Array, used: Int64Array
) -> plan_pb2.TaskTable:
    """The tasks ``row``, with documents renumbered, and servers by their place in ``used``."""
    chosen = {
        "document": new_document,
        "q_begin": columns["q_begin"][row],
        "q_end": columns["q_end"][row],
        "server": np.searchsorted(used, columns["server"][row]),
    }
    return plan_pb2.TaskTable(**_encoded(chosen, TASK_COLUMNS))


def _rows_of(documents: Int64Array, first: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The rows of ``documents``, whose rows begin at ``first``; and for each row the place of its
    document in ``documents``."""
    begin = first[documents]
    length = first[documents + 1] - begin
    return runs_to_rows(begin, length), np.repeat(np.arange(len(documents)), length)


def _first_task(table: TaskTable, n_documents: int) -> Int64Array:
    """``[n_documents + 1]``: document d owns tasks ``[first[d], first[d + 1])``."""
    return np.searchsorted(table.document, np.arange(n_documents + 1))


def _columns(message: Any, specs: Columns) -> dict[str, NDArray[Any]]:
    return {name: np.frombuffer(getattr(message, name), dtype) for name, dtype in specs.items()}


def _encoded(columns: dict[str, NDArray[Any]], specs: Columns) -> dict[str, bytes]:
    return {name: columns[name].astype(dtype).tobytes() for name, dtype in specs.items()}
