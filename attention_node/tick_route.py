"""How one server runs a (nano-batch, phase): which tasks share tensors, what each waits for, and
how its results find their way home. Derived once per step, used by every layer's tick.

Tasks are grouped into *parts*: all tasks with the same home, the same key tensor and the same set
of ranks to wait for. The tasks of a part become ready at one moment, so a part runs whole and in
task order; gradients of K and V accumulate per part and are summed over parts in a fixed order.
Results therefore have the same bits whatever order messages arrive in.

Keys of a document whose needed rows lie in one piece in its source's tensor are read there. Only a
document that spans ranks (or lies in several pieces) has its keys copied together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from attention_node.machine.outline import TickOutline
from core_attention.arrays import BoolArray, Int64Array, exclusive_cumsum, frozen, runs_to_rows
from core_attention.ca_task import Phase, TaskTable, qk_pairs
from core_attention.host_copies import on_device
from core_attention.kernels.protocol import TaskBatch
from core_attention.plan import Plan
from core_attention.routing import PairRoute, derive_routes

ASSEMBLED = -1
"""In place of a rank: the key tensor that the server assembles from several pieces."""


@dataclass(frozen=True, eq=False)
class Part:
    """Tasks that share tensors and become ready together.

    Attributes:
        q_source: rank whose tensors hold the queries.
        k_source: rank whose tensors hold keys and values, or ASSEMBLED.
        needs: ranks whose messages must have arrived.
        tasks: row ranges in the tensors of those sources.
        qk_pairs: query-key pairs of all tasks, the measure of work.
        n_dk_rows: rows of the part's own dK and dV.
    """

    q_source: int
    k_source: int
    needs: frozenset[int]
    tasks: TaskBatch
    qk_pairs: int
    n_dk_rows: int

    @cached_property
    def query_rows(self) -> int:
        """Query rows of all tasks."""
        return int((self.tasks.q_end - self.tasks.q_begin).sum())


@dataclass(frozen=True)
class RowCopy:
    """``length`` rows from ``source_row`` of one tensor to ``target_row`` of another."""

    source_row: int
    target_row: int
    length: int


@dataclass(frozen=True, eq=False)
class TickRoute:
    """One server's view of a (nano-batch, phase).

    Attributes:
        pairs: by home rank, what is exchanged with it.
        parts: in the order in which their dK and dV are summed.
        n_assembled_rows: rows of the assembled key tensor.
        assembly: by rank, the pieces of its keys that go into the assembled tensor.
        dk_sums: by rank, for each part (its index), the rows of the part's dK that go into the
            rank's reply, in part order.
    """

    pairs: Mapping[int, PairRoute]
    parts: tuple[Part, ...]
    n_assembled_rows: int
    assembly: Mapping[int, tuple[RowCopy, ...]]
    dk_sums: Mapping[int, tuple[tuple[int, RowCopy], ...]]

    def outline(
        self, phase: Phase, *, owed: frozenset[int], message_bytes: Mapping[int, int]
    ) -> TickOutline:
        """What a tick of ``phase`` asks of whom.

        Args:
            phase: the phase.
            owed: the ranks that wait for rows before they go on.
            message_bytes: by rank that is connected, memory of its messages of a tick.
        """
        return TickOutline(
            needs=tuple(part.needs for part in self.parts),
            before_reply={rank: self._parts_before_reply(rank, phase) for rank in self.pairs},
            owed=owed,
            message_bytes=message_bytes,
        )

    def _parts_before_reply(self, rank: int, phase: Phase) -> frozenset[int]:
        """The parts with queries of ``rank``, and backward also those that read its keys."""
        parts = {i for i, part in enumerate(self.parts) if part.q_source == rank}
        if phase is Phase.BACKWARD:
            parts.update(index for index, _ in self.dk_sums[rank])
        return frozenset(parts)

    def assembly_rows(self, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """``assembly[rank]`` row by row: int64 source and target rows, on ``device``."""
        rows = self._assembly_rows.get((rank, device))
        if rows is None:
            copies = self.assembly[rank]
            length = np.array([copy.length for copy in copies], dtype=np.int64)
            source = np.array([copy.source_row for copy in copies], dtype=np.int64)
            target = np.array([copy.target_row for copy in copies], dtype=np.int64)
            rows = self._assembly_rows[rank, device] = (
                on_device(torch.from_numpy(runs_to_rows(source, length)), device),
                on_device(torch.from_numpy(runs_to_rows(target, length)), device),
            )
        return rows

    @cached_property
    def _assembly_rows(
        self,
    ) -> dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]]:
        return {}


NOTHING = TickRoute(pairs={}, parts=(), n_assembled_rows=0, assembly={}, dk_sums={})
"""The route of a tick in which no document takes part."""


def derive_tick_route(
    plan: Plan,
    server: int,
    nano_batch: int,
    phase: Phase,
    local_rank: int | None,
    documents: BoolArray | None = None,
) -> TickRoute:
    """The route of ``server`` for a (nano-batch, phase).

    Args:
        plan: the step's plan, or the server's slice of it.
        server: index of the server in ``plan.servers``.
        nano_batch: which nano-batch.
        phase: which phase.
        local_rank: the rank in whose process the server runs; its tensors are used where they
            are, by packed row, instead of by place in a message.
        documents: ``[n_documents]`` which documents take part; None for all.
    """
    tasks = plan.tasks(phase)
    routes = derive_routes(plan.manifest, tasks, nano_batch, documents)
    pairs = {rank: route for (rank, index), route in routes.items() if index == server}
    keys = _document_keys(pairs, local_rank)
    k_end = tasks.k_end(plan.manifest)
    grouped = _group_tasks(pairs, tasks, k_end, keys, local_rank)
    assembled_begin, n_assembled_rows = _assembled_begin(grouped, tasks, k_end)
    parts, dk_spans = [], []
    for group in sorted(grouped, key=lambda group: (group[0], group[1], sorted(group[2]))):
        k_row_of = (
            assembled_begin
            if group[1] == ASSEMBLED
            else {document: entry.begin for document, entry in keys.items()}
        )
        part, spans = _part(group, grouped[group], tasks, k_end, k_row_of)
        parts.append(part)
        dk_spans.append(spans)
    return TickRoute(
        pairs=pairs,
        parts=tuple(parts),
        n_assembled_rows=n_assembled_rows,
        assembly=_assembly(pairs, assembled_begin, local_rank),
        dk_sums={rank: _dk_sums(route, dk_spans) for rank, route in pairs.items()},
    )


@dataclass(frozen=True)
class _DocumentKeys:
    """Where a document's keys come from, in the order of their positions.

    Attributes:
        pieces: (offset, rank) of each run.
        begin: row of position 0 in its source's tensor.
        contiguous: positions that follow one another in that tensor from ``begin`` on.
    """

    pieces: tuple[tuple[int, int], ...]
    begin: int
    contiguous: int

    def needs(self, k_end: int) -> frozenset[int]:
        """The ranks that hold keys ``[0, k_end)``."""
        return frozenset(rank for offset, rank in self.pieces if offset < k_end)


_Group = tuple[int, int, frozenset[int]]
_ChosenTask = tuple[int, int]
"""(index in the task table, first row of its queries in its source's tensor)."""


def _document_keys(
    pairs: Mapping[int, PairRoute], local_rank: int | None
) -> dict[int, _DocumentKeys]:
    runs: dict[int, list[tuple[int, int, int, int]]] = {}
    for rank, route in pairs.items():
        rows = route.kv_row if rank == local_rank else route.kv_position
        for document, offset, row, length in zip(
            route.kv_document.tolist(),
            route.kv_offset.tolist(),
            rows.tolist(),
            route.kv_length.tolist(),
            strict=True,
        ):
            runs.setdefault(document, []).append((offset, rank, row, length))
    keys = {}
    for document, pieces in runs.items():
        pieces.sort()
        _, source, begin, _ = pieces[0]
        contiguous = 0
        for offset, rank, row, length in pieces:
            if rank != source or row != begin + offset:
                break
            contiguous += length
        keys[document] = _DocumentKeys(
            tuple((offset, rank) for offset, rank, _, _ in pieces), begin, contiguous
        )
    return keys


def _group_tasks(
    pairs: Mapping[int, PairRoute],
    tasks: TaskTable,
    k_ends: Int64Array,
    keys: Mapping[int, _DocumentKeys],
    local_rank: int | None,
) -> dict[_Group, list[_ChosenTask]]:
    """Tasks by (query source, key source, ranks to wait for), each list in task order."""
    grouped: dict[_Group, list[_ChosenTask]] = {}
    for rank, route in pairs.items():
        rows = route.q_row if rank == local_rank else route.q_position
        for task, row in zip(route.task.tolist(), rows.tolist(), strict=True):
            document_keys = keys[int(tasks.document[task])]
            k_end = int(k_ends[task])
            # Under the causal mask the task's home holds key k_end - 1, so a prefix in one piece is
            # at home too; under the full mask all of the document then lies in one place.
            k_source = rank if k_end <= document_keys.contiguous else ASSEMBLED
            group = (rank, k_source, document_keys.needs(k_end))
            grouped.setdefault(group, []).append((task, row))
    return grouped


def _assembled_begin(
    grouped: Mapping[_Group, list[_ChosenTask]], tasks: TaskTable, k_ends: Int64Array
) -> tuple[dict[int, int], int]:
    """Where each assembled document's position 0 lies, and the rows in all."""
    extent: dict[int, int] = {}
    for (_, k_source, _), chosen in grouped.items():
        if k_source == ASSEMBLED:
            for task, _ in chosen:
                document, k_end = int(tasks.document[task]), int(k_ends[task])
                extent[document] = max(extent.get(document, 0), k_end)
    begin, n_rows = {}, 0
    for document in sorted(extent):
        begin[document] = n_rows
        n_rows += extent[document]
    return begin, n_rows


def _part(
    group: _Group,
    chosen: Sequence[_ChosenTask],
    tasks: TaskTable,
    k_ends: Int64Array,
    k_row_of: Mapping[int, int],
) -> tuple[Part, dict[int, tuple[int, int]]]:
    """The part of one group, and by document its (first row, rows) in the part's dK."""
    index = np.array([task for task, _ in chosen], dtype=np.int64)
    q_begin = np.array([row for _, row in chosen], dtype=np.int64)
    document, k_end = tasks.document[index], k_ends[index]
    q_length = tasks.q_end[index] - tasks.q_begin[index]
    documents, which = np.unique(document, return_inverse=True)
    extent = np.zeros(len(documents), dtype=np.int64)
    np.maximum.at(extent, which, k_end)
    dk_row = exclusive_cumsum(extent)
    k_begin = np.array([k_row_of[int(d)] for d in documents], dtype=np.int64)[which]
    batch = TaskBatch(
        q_begin=frozen(q_begin),
        q_end=frozen(q_begin + q_length),
        k_begin=frozen(k_begin),
        k_end=frozen(k_begin + k_end),
        dk_begin=frozen(dk_row[which]),
    )
    q_source, k_source, needs = group
    part = Part(
        q_source=q_source,
        k_source=k_source,
        needs=needs,
        tasks=batch,
        qk_pairs=int(qk_pairs(q_length, k_end, tasks.mask).sum()),
        n_dk_rows=int(extent.sum()),
    )
    spans = zip(documents.tolist(), dk_row.tolist(), extent.tolist(), strict=True)
    return part, {document: (row, rows) for document, row, rows in spans}


def _assembly(
    pairs: Mapping[int, PairRoute], begin: Mapping[int, int], local_rank: int | None
) -> dict[int, tuple[RowCopy, ...]]:
    """By rank, what it contributes to the assembled keys.

    A document's last task is assembled if any is, so all keys of such a document are wanted."""
    assembly: dict[int, tuple[RowCopy, ...]] = {}
    for rank, route in pairs.items():
        rows = route.kv_row if rank == local_rank else route.kv_position
        runs = zip(
            route.kv_document.tolist(),
            route.kv_offset.tolist(),
            rows.tolist(),
            route.kv_length.tolist(),
            strict=True,
        )
        assembly[rank] = tuple(
            RowCopy(row, begin[document] + offset, length)
            for document, offset, row, length in runs
            if document in begin
        )
    return assembly


def _dk_sums(
    route: PairRoute, dk_spans: Sequence[Mapping[int, tuple[int, int]]]
) -> tuple[tuple[int, RowCopy], ...]:
    """The rows of every part's dK that are at home on the route's rank; the target is the row in
    the reply. Copies that follow one another on both sides are joined."""
    sums: list[tuple[int, RowCopy]] = []
    runs = list(
        zip(
            route.kv_document.tolist(),
            route.kv_offset.tolist(),
            route.kv_position.tolist(),
            route.kv_length.tolist(),
            strict=True,
        )
    )
    for part, spans in enumerate(dk_spans):
        for document, offset, position, length in runs:
            first, extent = spans.get(document, (0, 0))
            if offset >= extent:
                continue
            copy = RowCopy(first + offset, position, min(length, extent - offset))
            if sums and sums[-1][0] == part and _follows(sums[-1][1], copy):
                previous = sums.pop()[1]
                copy = RowCopy(
                    previous.source_row, previous.target_row, previous.length + copy.length
                )
            sums.append((part, copy))
    return tuple(sums)


def _follows(before: RowCopy, copy: RowCopy) -> bool:
    return (
        before.source_row + before.length == copy.source_row
        and before.target_row + before.length == copy.target_row
    )
