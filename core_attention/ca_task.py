"""CA-tasks: pieces of core attention that any attention server can run.

A CA-task is a query range ``[q_begin, q_end)`` of one document with its whole context: keys
``[0, q_end)``, or all of the document under the full mask. Its output is therefore final: nothing
is merged by log-sum-exp (paper, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

import numpy as np

from core_attention.arrays import BoolArray, Int64Array, exclusive_cumsum, int64_column
from core_attention.errors import PlanError
from core_attention.manifest import Manifest


class MaskKind(IntEnum):
    """The keys of a document that a query sees. Numbered as in ``distca/v1/profile.proto``."""

    CAUSAL = 1
    """Its own and those before it."""
    FULL = 2
    """All of the document."""


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
        mask: which keys their queries see.
    """

    document: Int64Array
    q_begin: Int64Array
    q_end: Int64Array
    server: Int64Array
    mask: MaskKind = field(default=MaskKind.CAUSAL, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("document", "q_begin", "q_end", "server"):
            object.__setattr__(self, name, int64_column(getattr(self, name), name))
        sizes = {len(self.document), len(self.q_begin), len(self.q_end), len(self.server)}
        if len(sizes) != 1:
            raise PlanError(f"task columns have different lengths: {sorted(sizes)}")

    def __len__(self) -> int:
        return len(self.document)

    def k_end(self, manifest: Manifest) -> Int64Array:
        """``[n_tasks]`` where each task's keys end: they are ``[0, k_end)`` of its document."""
        if self.mask is MaskKind.CAUSAL:
            return self.q_end
        return manifest.document_length[self.document]

    def qk_pairs(self, manifest: Manifest) -> Int64Array:
        """``[n_tasks]`` query-key pairs."""
        return qk_pairs(self.q_end - self.q_begin, self.k_end(manifest), self.mask)

    def check(self, manifest: Manifest, n_servers: int) -> None:
        """Checks the plan invariants against ``manifest``.

        Raises:
            PlanError: the tasks do not partition the documents, or span segments.
        """
        self._check_servers(n_servers)
        step = self.document[1:] - self.document[:-1]
        self._check_documents(manifest, step)
        self._check_partition(manifest, step != 0)
        self._check_homes(manifest)

    def _check_servers(self, n_servers: int) -> None:
        # Read as unsigned, what is negative is large.
        if not len(self) or self.server.view(np.uint64).max() < n_servers:
            return
        unknown = (self.server < 0) | (self.server >= n_servers)
        raise PlanError(
            f"a task names server {self.server[unknown][0]}; the plan has servers 0 to "
            f"{n_servers - 1}"
        )

    def _check_documents(self, manifest: Manifest, step: Int64Array) -> None:
        """Every document has tasks, in order; ``step``: from each task's to the next one's."""
        n = manifest.n_documents
        if len(self) and self.document[0] == 0 and self.document[-1] == n - 1:
            if (step.view(np.uint64) <= 1).all():
                return
        elif len(self) == n == 0:
            return
        outside = (self.document < 0) | (self.document >= n)
        if outside.any() or (step < 0).any():
            raise PlanError(
                "tasks must be sorted by document, with documents in "
                f"[0, {n}); got {self.document[outside][:1].tolist()}"
            )
        at = int(np.setdiff1d(np.arange(n), self.document)[0])
        raise PlanError(f"document {manifest.document_id[at]} has no CA-task")

    def _check_partition(self, manifest: Manifest, is_last: BoolArray) -> None:
        """The tasks of each document cover it once, in order.

        Args:
            is_last: ``[n_tasks - 1]`` whether a task is its document's last.
        """
        # Where documents are cut between nano-batches, by the slower way.
        follows = self.q_begin[1:] == self.q_end[:-1]
        if (
            not manifest.n_carried
            and not self.q_begin[:1].any()
            and ((self.q_begin[1:] == 0) == is_last).all()
            and (follows | is_last).all()
            and (self.q_end > self.q_begin).all()
            and np.array_equal(self.q_end[:-1][is_last], manifest.document_length[:-1])
            and np.array_equal(self.q_end[-1:], manifest.document_length[-1:])
        ):
            return
        last = np.append(np.flatnonzero(is_last), len(self) - 1)
        begin = manifest.document_begin
        expected = np.append(
            begin[:1], np.where(is_last, begin[self.document[1:]], self.q_end[:-1])
        )
        wrong = (self.q_begin != expected) | (self.q_end <= self.q_begin)
        wrong[last] |= self.q_end[last] != manifest.document_length
        if not wrong.any():
            return
        at = int(np.flatnonzero(wrong)[0])
        document = int(self.document[at])
        raise PlanError(
            f"document {manifest.document_id[document]}: the task [{self.q_begin[at]}, "
            f"{self.q_end[at]}) breaks the partition of [{begin[document]}, "
            f"{manifest.document_length[document]}); expected a non-empty range that begins "
            f"at {expected[at]}"
        )

    def _check_homes(self, manifest: Manifest) -> None:
        """Checks that a task ends where a segment ends; the tasks are a partition already."""
        if manifest.n_segments == manifest.n_documents:
            return
        inner = np.flatnonzero(manifest.segment_offset)
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


def qk_pairs(q_length: Int64Array, kv_length: Int64Array, mask: MaskKind) -> Int64Array:
    """Query-key pairs of ``q_length`` queries of which the last sees ``kv_length`` keys under the
    causal mask, and every one all keys under the full mask."""
    if mask is MaskKind.FULL:
        return q_length * kv_length
    return causal_qk_pairs(kv_length - q_length, kv_length)


def home_segment(manifest: Manifest, tasks: TaskTable) -> Int64Array:
    """``[n_tasks]`` index of the segment that holds each task's first query."""
    # Positions of all documents on one line, so that one binary search serves every task.
    line = exclusive_cumsum(manifest.document_length)
    segment_start = line[manifest.segment_document] + manifest.segment_offset
    at = np.searchsorted(segment_start, line[tasks.document] + tasks.q_begin, side="right") - 1
    return at.astype(np.int64)
