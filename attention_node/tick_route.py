"""The route of one server for a (nano-batch, phase): which tasks share tensors, what each waits
for, and how its results find their way home. Derived once per step, used by every layer's tick.

Tasks are grouped into *parts*: all tasks with the same home, the same key tensor and the same set
of ranks to wait for. The tasks of a part become ready at one moment, so a part runs whole and in
task order; gradients of K and V accumulate per part and are summed over parts in a fixed order.
Results therefore have the same bits whatever order messages arrive in.

Keys of a document whose needed rows lie in one piece in its source's tensor are read there. Only a
document that spans ranks (or lies in several pieces) has its keys copied together.

What only the rank in the server's own process waits for is cut into parts of milliseconds, since
other ranks' rows may come meanwhile: forward anywhere, backward between documents, whose gradients
have no row in common. So parts follow from the plan alone, and sums have the bits of one part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from attention_node.machine.outline import TickOutline
from core_attention.arrays import (
    BoolArray,
    Int64Array,
    exclusive_cumsum,
    frozen,
    group_bounds,
    runs_to_rows,
)
from core_attention.ca_task import MaskKind, Phase, TaskTable, qk_pairs
from core_attention.host_copies import on_device
from core_attention.kernels.protocol import TaskBatch
from core_attention.plan import Plan
from core_attention.routing import PairRoute, derive_routes

ASSEMBLED = -1
"""A number in place of a rank: the key tensor that the server assembles from several pieces."""

OWN_FLOPS = {"cpu": 2.5e8, "cuda": 2.5e12}
"""Work of a part that only the own rank waits for, by device type: 5 ms of an H200. A shorter call
would not fill it."""

_CUT_ROWS = 128
"""Tasks are cut at multiples of it: kernels compute so many rows at a time."""


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
        is_own: only the rank in the server's own process waits for it.
    """

    q_source: int
    k_source: int
    needs: frozenset[int]
    tasks: TaskBatch
    qk_pairs: int
    n_dk_rows: int
    is_own: bool

    @cached_property
    def query_rows(self) -> int:
        """Query rows of all tasks."""
        return int((self.tasks.q_end - self.tasks.q_begin).sum())


class RowCopy(NamedTuple):
    """``length`` rows from ``source_row`` of one tensor to ``target_row`` of another."""

    source_row: int
    target_row: int
    length: int


class RowCopies(NamedTuple):
    """Several :class:`RowCopy`: ``[n]`` each."""

    source_row: Int64Array
    target_row: Int64Array
    length: Int64Array

    def each(self) -> list[RowCopy]:
        """One after another."""
        return list(map(RowCopy, *(column.tolist() for column in self)))


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
    assembly: Mapping[int, RowCopies]
    dk_sums: Mapping[int, tuple[tuple[int, RowCopy], ...]]

    def outline(
        self, phase: Phase, *, owed: frozenset[int], message_bytes: Mapping[int, int]
    ) -> TickOutline:
        """The outline of a tick of ``phase``.

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
            source, target, length = self.assembly[rank]
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
    own_pairs: int | None = None,
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
        own_pairs: query-key pairs of a part that only the local rank waits for; None for no limit.
    """
    tasks = plan.tasks(phase)
    routes = derive_routes(plan.manifest, tasks, nano_batch, documents)
    pairs = {rank: route for (rank, index), route in routes.items() if index == server}
    if not pairs:
        return NOTHING
    keys = _document_keys(pairs, local_rank, plan.manifest.n_documents)
    chosen = _chosen_tasks(pairs, tasks, tasks.k_end(plan.manifest), keys, local_rank)
    if own_pairs is not None and local_rank is not None and phase is Phase.FORWARD:
        chosen = _cut(chosen, local_rank, tasks.mask, own_pairs)
    assembled_begin, n_assembled_rows = _assembled_begin(chosen, plan.manifest.n_documents)
    parts, spans = [], []
    for group, needs in _groups(chosen, keys, list(pairs)):
        of_group = chosen.at(group)
        k_row = assembled_begin if of_group.k_source[0] == ASSEMBLED else keys.begin
        is_own = local_rank == of_group.q_source[0].item() and (
            phase is Phase.FORWARD or needs == {local_rank}
        )
        most_pairs = own_pairs if is_own else None
        for some in _slices(of_group, tasks.mask, phase, most_pairs):
            part, its = _part(some, needs, k_row, tasks.mask, is_own=is_own)
            parts.append(part)
            spans.append(its)
    return TickRoute(
        pairs=pairs,
        parts=tuple(parts),
        n_assembled_rows=n_assembled_rows,
        assembly={
            rank: _assembly(route, assembled_begin, is_local=rank == local_rank)
            for rank, route in pairs.items()
        },
        dk_sums=_dk_sums(spans, keys, list(pairs)),
    )


class _DocumentKeys(NamedTuple):
    """The places that the keys of each document come from.

    Attributes:
        begin: ``[n_documents]`` row of position 0 in the tensor of the rank that holds it.
        contiguous: ``[n_documents]`` positions that follow one another in that tensor from
            ``begin`` on.
        first: ``[n_documents + 1]`` bounds of a document's runs of keys, which are:
        rank, offset, length, position: ``[n_runs]`` by offset: who holds each, where in the
            document it begins, its keys, and where it begins in the message of its rank.
    """

    begin: Int64Array
    contiguous: Int64Array
    first: Int64Array
    rank: Int64Array
    offset: Int64Array
    length: Int64Array
    position: Int64Array

    def needs(self, document: int, k_end: int) -> frozenset[int]:
        """The ranks that hold keys ``[0, k_end)``."""
        its = slice(self.first[document], self.first[document + 1])
        return frozenset(self.rank[its][self.offset[its] < k_end].tolist())


class _Tasks(NamedTuple):
    """Tasks of the server: ``[n]`` each, home after home, in task order.

    Attributes:
        q_source, k_source: as of :class:`Part`.
        document: index into the documents.
        q_row: first row of the queries in their source's tensor.
        q_length: queries.
        k_end: keys.
    """

    q_source: Int64Array
    k_source: Int64Array
    document: Int64Array
    q_row: Int64Array
    q_length: Int64Array
    k_end: Int64Array

    def at(self, index: Int64Array) -> _Tasks:
        """Some of them."""
        return _Tasks(*(column[index] for column in self))


class _Spans(NamedTuple):
    """Rows of documents in a part's dK: ``[n]`` each, sorted by document."""

    document: Int64Array
    row: Int64Array
    rows: Int64Array


def _document_keys(
    pairs: Mapping[int, PairRoute], local_rank: int | None, n_documents: int
) -> _DocumentKeys:
    rank = np.repeat(list(pairs), [len(route.kv_document) for route in pairs.values()])
    document, offset, length, position, row = (
        np.concatenate(columns)
        for columns in zip(
            *(
                (
                    route.kv_document,
                    route.kv_offset,
                    route.kv_length,
                    route.kv_position,
                    route.kv_row if rank == local_rank else route.kv_position,
                )
                for rank, route in pairs.items()
            ),
            strict=True,
        )
    )
    order = np.lexsort((rank, offset, document))
    document, rank, offset, length, position, row = (
        column[order] for column in (document, rank, offset, length, position, row)
    )
    first = np.searchsorted(document, np.arange(n_documents + 1))
    leads = first[:-1][document]
    follows = (rank == rank[leads]) & (row == row[leads] + offset)
    # A run counts while all before it follow one another, too.
    broken = np.cumsum(~follows)
    follows &= broken == broken[leads]
    begin, contiguous = np.zeros((2, n_documents), dtype=np.int64)
    begin[document] = row[leads]
    np.add.at(contiguous, document[follows], length[follows])
    return _DocumentKeys(begin, contiguous, first, rank, offset, length, position)


def _chosen_tasks(
    pairs: Mapping[int, PairRoute],
    tasks: TaskTable,
    k_ends: Int64Array,
    keys: _DocumentKeys,
    local_rank: int | None,
) -> _Tasks:
    rank = np.repeat(list(pairs), [len(route.task) for route in pairs.values()])
    task = np.concatenate([route.task for route in pairs.values()])
    row = np.concatenate(
        [route.q_row if rank == local_rank else route.q_position for rank, route in pairs.items()]
    )
    document, k_end = tasks.document[task], k_ends[task]
    # Under the causal mask the task's home holds key k_end - 1, so a prefix in one piece is at home
    # too; under the full mask all of the document then lies in one place.
    k_source = np.where(k_end <= keys.contiguous[document], rank, ASSEMBLED)
    q_length = tasks.q_end[task] - tasks.q_begin[task]
    return _Tasks(rank, k_source, document, row, q_length, k_end)


def _groups(
    chosen: _Tasks, keys: _DocumentKeys, ranks: list[int]
) -> list[tuple[Int64Array, frozenset[int]]]:
    """Groups ``chosen`` into parts: tasks of equal query source, key source and ranks to wait
    for, sorted by these, each with the ranks."""
    number = {frozenset([rank]): at for at, rank in enumerate(ranks)}
    # Keys in one piece, which most are, need the rank that holds them.
    which = np.searchsorted(ranks, keys.rank[keys.first[:-1][chosen.document]])
    for at in np.flatnonzero(chosen.k_end > keys.contiguous[chosen.document]).tolist():
        held_by = keys.needs(int(chosen.document[at]), int(chosen.k_end[at]))
        which[at] = number.setdefault(held_by, len(number))
    needs = list(number)
    place = np.empty(len(needs), dtype=np.int64)
    place[sorted(range(len(needs)), key=lambda at: sorted(needs[at]))] = np.arange(len(needs))
    columns = (chosen.q_source, chosen.k_source, place[which])
    order = np.lexsort(columns[::-1])
    bounds = group_bounds(tuple(column[order] for column in columns))
    groups = [order[begin:end] for begin, end in pairwise(bounds.tolist())]
    return [(group, needs[which[group[0]]]) for group in groups]


def _cut(chosen: _Tasks, local_rank: int, mask: MaskKind, most_pairs: int) -> _Tasks:
    """The tasks, those of the local rank cut into such of about ``most_pairs`` at most, each with
    all keys that its queries see."""
    wanted = -(-qk_pairs(chosen.q_length, chosen.k_end, mask) // most_pairs)
    wanted = np.where(chosen.q_source == local_rank, wanted, 1)
    step = -(-chosen.q_length // (wanted * _CUT_ROWS)) * _CUT_ROWS
    n_cuts = -(-chosen.q_length // step)
    task = np.repeat(np.arange(len(step)), n_cuts)
    whole, begin = chosen.at(task), runs_to_rows(np.zeros_like(n_cuts), n_cuts) * step[task]
    end = np.minimum(begin + step[task], whole.q_length)
    unseen = whole.q_length - end if mask is MaskKind.CAUSAL else 0
    return whole._replace(
        q_row=whole.q_row + begin, q_length=end - begin, k_end=whole.k_end - unseen
    )


def _slices(tasks: _Tasks, mask: MaskKind, phase: Phase, most_pairs: int | None) -> list[_Tasks]:
    """Runs of tasks that begin every ``most_pairs`` query-key pairs; all in one if that is None."""
    if most_pairs is None:
        return [tasks]
    before = exclusive_cumsum(qk_pairs(tasks.q_length, tasks.k_end, mask))
    if phase is Phase.BACKWARD:
        before = before[np.searchsorted(tasks.document, tasks.document)]
    bounds = group_bounds((before // most_pairs,))
    return [tasks.at(np.arange(begin, end)) for begin, end in pairwise(bounds.tolist())]


def _assembled_begin(chosen: _Tasks, n_documents: int) -> tuple[Int64Array, int]:
    """``[n_documents]`` where the keys of each document that is assembled begin, -1 of others; and
    the rows in all."""
    extent = np.zeros(n_documents, dtype=np.int64)
    assembled = chosen.k_source == ASSEMBLED
    np.maximum.at(extent, chosen.document[assembled], chosen.k_end[assembled])
    return np.where(extent, exclusive_cumsum(extent), -1), int(extent.sum())


def _part(
    tasks: _Tasks, needs: frozenset[int], k_row: Int64Array, mask: MaskKind, *, is_own: bool
) -> tuple[Part, _Spans]:
    """The part of some tasks, and where their documents lie in its dK.

    Args:
        tasks: of one query source and one key source.
        needs: ranks to wait for.
        k_row: ``[n_documents]`` the row of position 0 of each in the key source's tensor.
        mask: of the job.
        is_own: see :class:`Part`.
    """
    documents, which = np.unique(tasks.document, return_inverse=True)
    extent = np.zeros(len(documents), dtype=np.int64)
    np.maximum.at(extent, which, tasks.k_end)
    dk_row, k_begin = exclusive_cumsum(extent), k_row[tasks.document]
    batch = TaskBatch(
        q_begin=frozen(tasks.q_row),
        q_end=frozen(tasks.q_row + tasks.q_length),
        k_begin=frozen(k_begin),
        k_end=frozen(k_begin + tasks.k_end),
        dk_begin=frozen(dk_row[which]),
    )
    part = Part(
        q_source=int(tasks.q_source[0]),
        k_source=int(tasks.k_source[0]),
        needs=needs,
        tasks=batch,
        qk_pairs=int(qk_pairs(tasks.q_length, tasks.k_end, mask).sum()),
        n_dk_rows=int(extent.sum()),
        is_own=is_own,
    )
    return part, _Spans(documents, dk_row, extent)


def _assembly(route: PairRoute, begin: Int64Array, *, is_local: bool) -> RowCopies:
    """The pieces that the route's rank contributes to the assembled keys.

    A document's last task is assembled if any is, so all keys of such a document are wanted."""
    wanted = begin[route.kv_document] >= 0
    rows = route.kv_row if is_local else route.kv_position
    target = begin[route.kv_document] + route.kv_offset
    return RowCopies(rows[wanted], target[wanted], route.kv_length[wanted])


def _dk_sums(
    spans: list[_Spans], keys: _DocumentKeys, ranks: list[int]
) -> dict[int, tuple[tuple[int, RowCopy], ...]]:
    """The rows of every part's dK that are at home on each rank; the target is the row in the
    reply. Copies that follow one another on both sides are joined."""
    part = np.repeat(np.arange(len(spans)), [len(its.document) for its in spans])
    document, row, rows = map(np.concatenate, zip(*spans, strict=True))
    n_runs = keys.first[document + 1] - keys.first[document]
    run = runs_to_rows(keys.first[document], n_runs)
    part, row, rows = (np.repeat(column, n_runs) for column in (part, row, rows))
    length = np.minimum(keys.length[run], rows - keys.offset[run])
    columns = (keys.rank[run], part, row + keys.offset[run], keys.position[run], length)
    # Of each part and rank in the order of documents and positions, as the runs are.
    order = np.lexsort(columns[1::-1])
    rank, part, source, target, length = (column[order[length[order] > 0]] for column in columns)
    begins = np.ones(len(length), dtype=np.bool_)
    begins[1:] = (rank[1:] != rank[:-1]) | (part[1:] != part[:-1])
    for copied in (source, target):
        begins[1:] |= copied[:-1] + length[:-1] != copied[1:]
    first = np.flatnonzero(begins)
    copies = RowCopies(source[first], target[first], np.add.reduceat(length, first))
    terms = list(zip(part[first].tolist(), copies.each(), strict=True))
    bounds = np.searchsorted(rank[first], [*ranks, ranks[-1] + 1])
    return {
        each: tuple(terms[begin:end])
        for each, (begin, end) in zip(ranks, pairwise(bounds.tolist()), strict=True)
    }
