"""CA-tasks: pieces of core attention that any attention server can run.

A CA-task is a query range ``[q_begin, q_end)`` of one document with its whole context, keys
``[0, q_end)``. Its output is therefore final: nothing is merged by log-sum-exp (paper, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np

from core_attention.arrays import Int64Array, int64_column
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
        unknown = (self.server < 0) | (self.server >= n_servers)
        if unknown.any():
            raise PlanError(
                f"a task names server {self.server[unknown][0]}; the plan has servers 0 to "
                f"{n_servers - 1}"
            )
        bounds = np.searchsorted(self.document, np.arange(manifest.n_documents + 1))
        begin, end = bounds[:-1], bounds[1:]
        outside = (self.document < 0) | (self.document >= manifest.n_documents)
        if outside.any() or (np.diff(self.document) < 0).any():
            raise PlanError(
                "tasks must be sorted by document, with documents in "
                f"[0, {manifest.n_documents}); got {self.document[outside][:1].tolist()}"
            )
        if (begin == end).any():
            at = int(np.flatnonzero(begin == end)[0])
            raise PlanError(f"document {manifest.document_id[at]} has no CA-task")
        expected = np.empty_like(self.q_end)
        expected[1:] = self.q_end[:-1]
        expected[begin] = 0
        wrong = (self.q_begin != expected) | (self.q_end <= self.q_begin)
        wrong[end - 1] |= self.q_end[end - 1] != manifest.document_length
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            document = int(self.document[at])
            raise PlanError(
                f"document {manifest.document_id[document]}: the task [{self.q_begin[at]}, "
                f"{self.q_end[at]}) breaks the partition of [0, "
                f"{manifest.document_length[document]}); expected a non-empty range that begins "
                f"at {expected[at]}"
            )
        segment = home_segment(manifest, self)
        segment_end = manifest.segment_offset[segment] + manifest.segment_length[segment]
        if (self.q_end > segment_end).any():
            at = int(np.flatnonzero(self.q_end > segment_end)[0])
            raise PlanError(
                f"document {manifest.document_id[self.document[at]]}: the task "
                f"[{self.q_begin[at]}, {self.q_end[at]}) crosses the end of its segment at "
                f"{segment_end[at]}; a task has one home"
            )


def causal_qk_pairs(q_begin: Int64Array, q_end: Int64Array) -> Int64Array:
    """Query-key pairs of queries ``[q_begin, q_end)`` that each see keys up to themselves."""
    return (q_end * (q_end + 1) - q_begin * (q_begin + 1)) // 2


def home_segment(manifest: Manifest, tasks: TaskTable) -> Int64Array:
    """``[n_tasks]`` index of the segment that holds each task's first query."""
    # Positions of all documents on one line, so that one binary search serves every task.
    line = np.cumsum(manifest.document_length) - manifest.document_length
    segment_start = line[manifest.segment_document] + manifest.segment_offset
    at = np.searchsorted(segment_start, line[tasks.document] + tasks.q_begin, side="right") - 1
    return at.astype(np.int64)
