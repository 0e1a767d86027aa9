"""Documents of a packed row that share prefixes, as a model's call says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from core_attention.errors import ManifestError
from core_attention.host_copies import on_host
from core_attention.manifest import NO_PARENT

TREE_ARGUMENTS = (
    "document_lengths",
    "document_offsets",
    "document_parents",
    "document_parent_ranks",
)
"""Arguments of calls whose documents share prefixes: integers on the CPU, one for each document.
The last one may be left out."""

Run = tuple[int, int]
"""First row and rows."""


class Branches(NamedTuple):
    """The places where documents branch off: one entry for each document of the row.

    Attributes:
        offsets: the position of its parent's path at which it begins, 0 without a parent.
        parents: the parent's place among the documents of its rank, or NO_PARENT.
        ranks: that hold the parents; None: the row has them.
    """

    offsets: tuple[int, ...]
    parents: tuple[int, ...]
    ranks: tuple[int, ...] | None = None

    def prefixes(self, lengths: Sequence[int]) -> list[list[Run]]:
        """The rows before each document's own, by position, of documents of these ``lengths``.

        Raises:
            ManifestError: another rank has them, or a parent has no such position.
        """
        if self.ranks is not None:
            raise ManifestError(
                "document_parent_ranks names ranks, and these rows are computed at home: leave "
                "it out, or have them served"
            )
        begins = list(accumulate(lengths, initial=0))
        found: dict[int, list[Run]] = {}

        def path(document: int) -> list[Run]:
            return [*found[document], (begins[document], lengths[document])]

        waiting = list(range(len(lengths)))
        while waiting:
            ready = [d for d in waiting if self.parents[d] in found or self.parents[d] < 0]
            if not ready:
                raise ManifestError(
                    f"document_parents of document {waiting[0]} is {self.parents[waiting[0]]}, "
                    "which leads to no document without a parent"
                )
            for document in ready:
                parent = self.parents[document]
                above = path(parent) if parent >= 0 else []
                found[document] = _first(above, self.offsets[document], document)
            waiting = [document for document in waiting if document not in found]
        return [found[document] for document in range(len(lengths))]


def _first(path: Sequence[Run], n_rows: int, document: int) -> list[Run]:
    """The first ``n_rows`` of a path."""
    ends = list(accumulate((rows for _, rows in path), initial=0))
    if not 0 <= n_rows <= ends[-1]:
        raise ManifestError(
            f"document_offsets of document {document} is {n_rows}; its parent's path has "
            f"positions 0 to {ends[-1]}"
        )
    cut = [(row, min(rows, n_rows - end)) for (row, rows), end in zip(path, ends, strict=False)]
    return [run for run in cut if run[1] > 0]


class RowDocuments(NamedTuple):
    """The documents of a packed row.

    Attributes:
        lengths: their own rows, in order.
        branches: where they branch off; None: none has a parent.
    """

    lengths: list[int]
    branches: Branches | None = None

    @property
    def offsets(self) -> Sequence[int]:
        """The position of each document's first row."""
        return (0,) * len(self.lengths) if self.branches is None else self.branches.offsets

    @classmethod
    def of_tree(cls, named: Mapping[str, Any], n_rows: int) -> RowDocuments | None:
        """Those that a call's :data:`TREE_ARGUMENTS` name; None if it has none.

        Raises:
            ManifestError: one is missing, or they do not fit together.
        """
        columns = {name: _integers(named.get(name)) for name in TREE_ARGUMENTS}
        if all(column is None for column in columns.values()):
            return None
        lengths, offsets, parents, ranks = (columns[name] for name in TREE_ARGUMENTS)
        if lengths is None or offsets is None or parents is None:
            missing = [name for name in TREE_ARGUMENTS[:3] if columns[name] is None]
            raise ManifestError(f"{' and '.join(missing)} is missing; give one for each document")
        for name, column in columns.items():
            if column is not None and len(column) != len(lengths):
                raise ManifestError(
                    f"{name} has {len(column)} entries, document_lengths {len(lengths)}; give one "
                    "for each document"
                )
        if sum(lengths) != n_rows or min(lengths, default=1) < 1:
            raise ManifestError(
                f"document_lengths has {sum(lengths)} rows, the least document "
                f"{min(lengths, default=0)}; the batch has {n_rows}, a document 1 or more"
            )
        for document, parent in enumerate(parents):
            is_beyond = ranks is None and parent >= len(lengths)
            if is_beyond or parent < NO_PARENT or (ranks is None and parent == document):
                raise ManifestError(
                    f"document_parents of document {document} is {parent}; valid are -1 and the "
                    f"places 0 to {len(lengths) - 1} of other documents"
                )
        own_rank = dist.get_rank() if dist.is_initialized() else 0
        holders = zip(ranks or (), parents, strict=False)
        is_spread = any(rank != own_rank for rank, parent in holders if parent != NO_PARENT)
        of_ranks = tuple(ranks) if ranks and is_spread else None
        return cls(lengths, Branches(tuple(offsets), tuple(parents), of_ranks))


def _integers(values: Any) -> list[int] | None:
    if values is None:
        return None
    return [int(v) for v in (on_host(values) if isinstance(values, torch.Tensor) else values)]
