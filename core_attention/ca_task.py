"""CA-tasks: pieces of core attention that any attention server can run.

A CA-task is a query range ``[q_begin, q_end)`` of one document with its whole context, keys
``[0, q_end)``. Its output is therefore final: nothing is merged by log-sum-exp (paper, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np

from core_attention.arrays import BoolArray, Int64Array, exclusive_cumsum, int64_column
from core_attention.errors import PlanError
from core_attention.manifest import Manifest


class MaskKind(IntEnum):
    """Which keys of a document a query sees. Numbered as in ``distca/v1/plan.proto``."""

    CAUSAL = 1


class Phase(StrEnum):
    """Forward or backward: every tick belongs to one of them."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, eq=False)
class TaskTable:
    """The CA-tasks of one phase of a step, sorted by (document, q_begin).

    Attributes:
        document: ``[n_tasks]`` index into the manifest's documents.
        q_begin, q_end: ``[n_tasks]`` half-open query range in the document.
        server: ``[n_tasks]`` index into the plan's servers.
    """

    document: Int64Array
    q_begin: Int64Array
    q_end: Int64Array
    server: Int64Array

    def __post_init__(self) -> None:
        for name in ("document", "q_begin", "q_end", "server"):
            object.__setattr__(self, name, int64_column(getattr(self, name), name))
        sizes = {len(self.document), len(self.q_begin), len(self.q_end), len(self.server)}
        if len(sizes) != 1:
            raise PlanError(f"task columns have different lengths: {sorted(sizes)}")

    def __len__(self) -> int:
        return len(self.document)

    @property
    def qk_pairs(self) -> Int64Array:
        """``[n_tasks]`` query-key pairs under the causal mask."""
        return causal_qk_pairs(self.q_begin, self.q_end)

    def check(self, manifest: Manifest, n_servers: int) -> None:
        """Checks the plan invariants against ``manifest``.

        Raises:
            PlanError: the tasks of a document do not partition ``[0, length)``, a task's q range
                lies in more than one segment, or a server index is out of range.
        """
        if len(self) and (self.server.min() < 0 or self.server.max() >= n_servers):
            unknown = (self.server < 0) | (self.server >= n_servers)
            raise PlanError(
                f"a task names server {self.server[unknown][0]}; the plan has servers 0 to "
                f"{n_servers - 1}"
            )
        same = self.document[1:] == self.document[:-1]
        begin = np.concatenate([np.zeros(min(len(self), 1), np.int64), np.flatnonzero(~same) + 1])
        self._check_documents(manifest, self.document[begin])
        self._check_partition(manifest, begin, same)
        self._check_homes(manifest)

    def _check_documents(self, manifest: Manifest, documents: Int64Array) -> None:
        """``documents``, of every run of tasks of one document, are all there are, in order."""
        if np.array_equal(documents, np.arange(manifest.n_documents)):
            return
        outside = (self.document < 0) | (self.document >= manifest.n_documents)
        if outside.any() or (np.diff(self.document) < 0).any():
            raise PlanError(
                "tasks must be sorted by document, with documents in "
                f"[0, {manifest.n_documents}); got {self.document[outside][:1].tolist()}"
            )
        at = int(np.setdiff1d(np.arange(manifest.n_documents), documents)[0])
        raise PlanError(f"document {manifest.document_id[at]} has no CA-task")

    def _check_partition(self, manifest: Manifest, begin: Int64Array, same: BoolArray) -> None:
        """The tasks of each document, whose first one is at ``begin``, cover it once, in order.

        Args:
            same: ``[n_tasks - 1]`` whether a task has the document of the next.
        """
        expected = np.zeros_like(self.q_end)
        np.multiply(self.q_end[:-1], same, out=expected[1:])
        wrong = (self.q_begin != expected) | (self.q_end <= self.q_begin)
        last = np.append(begin, len(self))[1:] - 1
        wrong[last] |= self.q_end[last] != manifest.document_length
        if not wrong.any():
            return
        at = int(np.flatnonzero(wrong)[0])
        document = int(self.document[at])
        raise PlanError(
            f"document {manifest.document_id[document]}: the task [{self.q_begin[at]}, "
            f"{self.q_end[at]}) breaks the partition of [0, "
            f"{manifest.document_length[document]}); expected a non-empty range that begins "
            f"at {expected[at]}"
        )

    def _check_homes(self, manifest: Manifest) -> None:
        """Where a segment ends, a task ends; the tasks are a partition already."""
        inner = np.flatnonzero(manifest.segment_offset)
        if not inner.size:
            return
        # Positions of all documents on one line, so that one binary search serves all.
        line = exclusive_cumsum(manifest.document_length)
        begin = line[self.document] + self.q_begin
        cut = line[manifest.segment_document[inner]] + manifest.segment_offset[inner]
        found = np.searchsorted(begin, cut)
        crossed = (found == len(begin)) | (begin[np.minimum(found, len(begin) - 1)] != cut)
        if crossed.any():
            k = int(np.flatnonzero(crossed)[0])
            at = int(found[k]) - 1
            raise PlanError(
                f"document {manifest.document_id[self.document[at]]}: the task "
                f"[{self.q_begin[at]}, {self.q_end[at]}) crosses the end of its segment at "
                f"{manifest.segment_offset[inner[k]]}; a task has one home"
            )


def causal_qk_pairs(q_begin: Int64Array, q_end: Int64Array) -> Int64Array:
    """Query-key pairs of queries ``[q_begin, q_end)`` that each see keys up to themselves."""
    return (q_end * (q_end + 1) - q_begin * (q_begin + 1)) // 2


def home_segment(manifest: Manifest, tasks: TaskTable) -> Int64Array:
    """``[n_tasks]`` index of the segment that holds each task's first query."""
    # Positions of all documents on one line, so that one binary search serves every task.
    line = exclusive_cumsum(manifest.document_length)
    segment_start = line[manifest.segment_document] + manifest.segment_offset
    at = np.searchsorted(segment_start, line[tasks.document] + tasks.q_begin, side="right") - 1
    return at.astype(np.int64)
